"""FlashInfer compatibility on the CPU, and what stays rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.batch_mla_cases import run
from tests.batch_mla_semantics import SOME
from tests.cases import MlaCase
from tests.drop_in_semantics import DropInSemantics
from tests.mla_rows import E4M3
from tests.mla_semantics import decode


class TestOnTheCpu(DropInSemantics):
    """Semantics of the compatible calls, without a GPU."""

    device = "cpu"


_DENSE = MlaCase(name="", seq_lens=(70, 3), q_len=2)
_SPARSE = MlaCase(name="", seq_lens=(300, 300), q_len=2, kv_format="fp8_ds_mla", top_k=70)
_BF16 = MlaCase(name="", seq_lens=(300, 300), q_len=2, top_k=70)
_LENS = torch.ones(4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            _DENSE,
            {"seq_lens": None},
            "seq_lens: expected a torch.Tensor (required without sparse_mla_top_k), got None",
        ),
        (
            _DENSE,
            {"multi_ctas_kv_counter_buffer": 1},
            "multi_ctas_kv_counter_buffer: expected a torch.Tensor, got int",
        ),
        (
            _DENSE,
            {"multi_ctas_kv_counter_buffer": torch.empty(1, device="meta")},
            "multi_ctas_kv_counter_buffer.device: expected cpu (of query), got meta",
        ),
        (
            _DENSE,
            {"cute_dsl_impl": "fast"},
            "cute_dsl_impl: expected one of auto, modular, monolithic, got 'fast'",
        ),
        (
            _DENSE,
            {"kv_scale_format": "UE8M0-G32"},
            (
                "kv_scale_format: expected another: scales of fp8_ds_mla are fp32 numbers, "
                "got 'UE8M0-G32'"
            ),
        ),
        (
            _DENSE,
            {"kv_scale_format": "e8m0"},
            "kv_scale_format: expected one of auto, pow2_fp32, arbitrary_fp32, got 'e8m0'",
        ),
        (
            _DENSE,
            {"backend": "sparse"},
            "sparse_mla_top_k: expected an int, 1 or more, got 0",
        ),
        (
            _BF16,
            {"backend": "sparse"},
            (
                "kv_cache.dtype: expected torch.uint8 (fp8_ds_mla, with backend 'sparse'), "
                "got torch.bfloat16"
            ),
        ),
        (
            _SPARSE,
            {"backend": "sparse", "sparse_mla_top_k_lens": _LENS},
            "sparse_mla_top_k_lens: expected None with backend 'sparse', got a value",
        ),
        (
            _SPARSE,
            {"backend": "sparse", "cum_seq_lens_q": _LENS},
            "cum_seq_lens_q: expected None with backend 'sparse', got a value",
        ),
        (
            _SPARSE,
            {"backend": "sparse", "seq_lens": _LENS[:3]},
            "seq_lens.shape: expected [2, 2] or [4] or [2] (batch, q_len), got [3]",
        ),
        (
            _SPARSE,
            {"seq_lens": None, "sparse_mla_top_k": 2**31 - 1},
            (
                "block_tables.shape: expected [2, 2, 2147483647] (batch, q_len, "
                "sparse_mla_top_k), got [2, 2, 70]"
            ),
        ),
        (
            _DENSE,
            {"out": torch.empty(2, 2, 16, 512).to(E4M3)},
            "out.dtype: expected torch.bfloat16 (dtype of query), got torch.float8_e4m3fn",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_what_stays_rejected(case: MlaCase, changes: dict[str, Any], message: str) -> None:
    """The message has the argument and the rule."""
    problem = case.build("cpu")

    with pytest.raises(ArgumentError) as caught:
        decode(problem, **changes)

    assert str(caught.value) == message


def test_the_scale_of_an_output_is_rejected_before_a_missing_plan() -> None:
    """`o_scale` is checked first, as in FlashInfer."""
    problem = SOME.build("cpu")
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), backend="fa2")

    with pytest.raises(ArgumentError, match="o_scale is only supported with the cutlass"):
        run(wrapper, problem, o_scale=0.1)
