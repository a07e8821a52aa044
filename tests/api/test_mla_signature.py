"""What an MLA decode call is remembered by."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest
import torch

from mlagen.api import mla_signature
from mlagen.api.mla_args import MlaArgNames, MlaArgs
from tests.api.launches import FACTS
from tests.cases import MlaCase

UNIFORM = MlaCase(name="", seq_lens=(70, 3), heads=16, with_sinks=True)
INT32 = torch.int32


def call_signature(inputs: MlaArgs, kernel: str = "auto", p_dtype_choice: str = "auto") -> Hashable:
    """Return the form, where it does not matter what the settings ask for."""
    return mla_signature.call_signature(inputs, kernel, p_dtype_choice)


def changed(inputs: MlaArgs, **fields: Any) -> MlaArgs:
    """Return the inputs with some fields of whatever type."""
    return inputs._replace(**fields)


CHANGES: dict[str, Callable[[MlaArgs], MlaArgs]] = {
    "query shape": lambda i: i._replace(query=i.query[:, :, :8]),
    "query dtype": lambda i: i._replace(query=i.query.half()),
    "cache shape": lambda i: i._replace(kv_cache=i.kv_cache[:, :32]),
    "cache strides": lambda i: i._replace(kv_cache=i.kv_cache.repeat(1, 2, 1)[:, :64]),
    "cache dtype": lambda i: i._replace(kv_cache=i.kv_cache.view(torch.float16)),
    "workspace size": lambda i: i._replace(workspace_buffer=i.workspace_buffer[1:]),
    "kv_lora_rank": lambda i: i._replace(kv_lora_rank=256),
    "kv_lora_rank a float": lambda i: changed(i, kv_lora_rank=512.0),
    "qk_rope_head_dim": lambda i: i._replace(qk_rope_head_dim=32),
    "qk_rope_head_dim a float": lambda i: changed(i, qk_rope_head_dim=64.0),
    "block table width": lambda i: i._replace(block_tables=i.block_tables[:, :2]),
    "lengths dtype": lambda i: i._replace(seq_lens=i.seq_lens.long()),
    "max_seq_len": lambda i: i._replace(max_seq_len=1000),
    "max_seq_len a float": lambda i: changed(i, max_seq_len=70.0),
    "max_seq_len a bool": lambda i: i._replace(max_seq_len=True),
    "max_seq_len a tensor": lambda i: changed(i, max_seq_len=torch.tensor(70)),
    "out given": lambda i: i._replace(out=torch.zeros(2, 1, 16, 512)),
    "bmm1_scale a tensor": lambda i: i._replace(bmm1_scale=torch.tensor(1.0)),
    "bmm2_scale an int": lambda i: i._replace(bmm2_scale=1),
    "no sinks": lambda i: i._replace(sinks=None),
    "return_lse": lambda i: i._replace(return_lse=True),
    "lse given": lambda i: i._replace(lse=torch.zeros(2, 16)),
    "return_lse_base": lambda i: i._replace(return_lse_base="basee"),
    "cum_seq_lens_q": lambda i: i._replace(cum_seq_lens_q=torch.zeros(3, dtype=INT32)),
    "max_q_len": lambda i: i._replace(max_q_len=2),
    "top_k": lambda i: i._replace(top_k=64),
    "top_k a float": lambda i: changed(i, top_k=0.0),
    "top_k_lens": lambda i: i._replace(top_k_lens=torch.zeros(2, dtype=INT32)),
    "not causal": lambda i: i._replace(is_causal=False),
    "scores_take_bmm2": lambda i: i._replace(scores_take_bmm2=True),
    "query_rope": lambda i: i._replace(query_rope=i.query[..., :64]),
    "query_scales": lambda i: i._replace(query_scales=torch.ones(2)),
    "rope_cache": lambda i: i._replace(rope_cache=i.kv_cache[..., :64]),
    "value_cache": lambda i: i._replace(value_cache=i.kv_cache),
    "kv_scales": lambda i: i._replace(kv_scales=torch.ones(7, 64, 4)),
    "latent_scale": lambda i: i._replace(latent_scale=0.5),
    "latent_scale a tensor": lambda i: changed(i, latent_scale=torch.ones(2)),
    "rope_scale": lambda i: i._replace(rope_scale=0.5),
    "table_starts": lambda i: i._replace(table_starts=torch.zeros(3, dtype=INT32)),
    "bias": lambda i: i._replace(bias=torch.zeros(2, 16, 70)),
    "is_fp8_per_token": lambda i: i._replace(is_fp8_per_token=True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_a_check_or_plan_may_see_is_part_of_the_form(
    change: Callable[[MlaArgs], MlaArgs],
) -> None:
    """A call that differs in it is checked and planned anew."""
    inputs = UNIFORM.build("cpu").inputs()

    other = call_signature(change(inputs))

    assert other != call_signature(inputs)


TENSORS = (
    "query",
    "kv_cache",
    "workspace_buffer",
    "block_tables",
    "seq_lens",
    "out",
    "bmm1_scale",
    "bmm2_scale",
    "sinks",
    "lse",
    "cum_seq_lens_q",
    "top_k_lens",
    "query_rope",
    "query_scales",
    "rope_cache",
    "value_cache",
    "kv_scales",
    "table_starts",
    "bias",
)


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("name", TENSORS)
def test_every_fact_of_every_tensor_is_part_of_the_form(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Two calls that differ in nothing else do not share a plan."""
    inputs, tensor = UNIFORM.build("cpu").inputs(), torch.ones(4, 4)

    one, other = (call_signature(changed(inputs, **{name: t})) for t in (tensor, change(tensor)))

    assert one is not None
    assert other is not None
    assert one != other


def test_the_kernel_that_the_settings_ask_for_is_part_of_the_form() -> None:
    """A call that is remembered with one kernel is not launched by another."""
    inputs = UNIFORM.build("cpu").inputs()

    forms = {call_signature(inputs, kernel) for kernel in ("auto", "sm80", "sm90")}

    assert len(forms) == 3


def test_so_is_what_they_ask_of_probabilities() -> None:
    """It is another kernel, too."""
    inputs = UNIFORM.build("cpu").inputs()

    assert call_signature(inputs, "auto", "auto") != call_signature(inputs, "auto", "fp16")


def test_a_ragged_call_of_another_hint_takes_another_form() -> None:
    """The tile is chosen for max_q_len, and a float in its place is rejected anew."""
    ragged = MlaCase(name="", seq_lens=(70, 3), q_lens=(1, 4)).build("cpu").inputs()

    forms = {call_signature(changed(ragged, max_q_len=hint)) for hint in (None, 4, 4.0, 5)}

    assert len(forms) == 4


def test_a_bias_must_cover_the_length_exactly() -> None:
    """Lengths that are planned alike are told apart where a bias must reach as far."""
    inputs = UNIFORM.build("cpu").inputs(bias=torch.zeros(2, 16, 70))

    assert call_signature(inputs._replace(max_seq_len=71)) != call_signature(inputs)


def test_content_and_names_are_no_part_of_the_form() -> None:
    """Other numbers in tensors of the same layout, and another float, make the same form."""
    case = MlaCase(name="", seq_lens=(70, 3), kv_format="e4m3", scales="two")
    inputs = case.build("cpu").inputs()
    other = inputs._replace(
        query=inputs.query.clone().zero_(),
        seq_lens=inputs.seq_lens + 1,
        bmm1_scale=0.5,
        latent_scale=0.25,
        names=MlaArgNames(query="q"),
    )

    assert call_signature(other) == call_signature(inputs)
    assert hash(call_signature(other)) == hash(call_signature(inputs))


@pytest.mark.parametrize("length", [70, np.int64(70)], ids=["int", "numpy"])
def test_lengths_that_are_planned_alike_share_a_form(length: int) -> None:
    """The next number of four leading bits stands for a length."""
    inputs = UNIFORM.build("cpu").inputs()

    one, other = (
        call_signature(inputs._replace(max_seq_len=type(length)(n))) for n in (length, 72)
    )

    assert one is not None
    assert one == other
