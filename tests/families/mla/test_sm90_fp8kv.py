"""Choice and parameters of the sm90 MLA kernel for an FP8 KV cache; needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.errors import UnsupportedError
from tests.families.launches import SCHEDULE_ID, SEMAPHORES, Launch, launched
from tests.problems.mla import MlaCase, mla_case

FP8_DS_MLA = "bf16 over fp8_ds_mla"
LONG = (64 * 129,)  # one KV block more than small calls have


def _launch(case: MlaCase, launches: list[Launch], kernel: str, **changes: Any) -> Launch:
    inputs = case.build("cpu").inputs(**changes)
    return launched(inputs, launches, kernel).launches[0]


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("bf16 over fp8_ds_mla", {"seq_lens": LONG}),
        ("bf16 over fp8_ds_mla", {"seq_lens": LONG, "page_size": 3}),
        ("bf16 over e4m3", {"seq_lens": LONG}),
        ("bf16 over e4m3 with scales for 128 elements", {"seq_lens": LONG}),
        ("bf16 over fp8_ds_mla", {"seq_lens": (70,) * 40, "top_k": 128, "heads": 64}),
    ],
)
def test_supported_calls_use_it_by_default(
    kind: str, fields: dict[str, Any], launches: list[Launch]
) -> None:
    """Supported calls use the kernel unless the settings request the sm80 kernel."""
    case = mla_case(kind, name="", **fields)

    for kernel in ("auto", "sm90"):
        launches.clear()
        assert _launch(case, launches, kernel).family == "mla_sm90_fp8kv"
    launches.clear()
    assert _launch(case, launches, "sm80").family == "mla_sm80"


@pytest.mark.parametrize("heads", [16, 128])
def test_a_small_call_uses_the_sm80_kernel(heads: int, launches: list[Launch]) -> None:
    """A small call with any heads uses the sm80 kernel unless the sm90 kernel is forced."""
    case = mla_case(FP8_DS_MLA, name="", seq_lens=(200,), heads=heads)

    assert _launch(case, launches, "auto").family == "mla_sm80"
    launches.clear()
    assert _launch(case, launches, "sm90").family == "mla_sm90_fp8kv"


@pytest.mark.parametrize("kind", ["fp16 over e4m3", "fp16 over fp8_ds_mla"])
def test_unsupported_calls_are_rejected_if_forced(kind: str, launches: list[Launch]) -> None:
    """The message of a forced, unsupported call lists the supported ones."""
    inputs = mla_case(kind, name="", seq_lens=(200,)).build("cpu").inputs()

    with pytest.raises(UnsupportedError, match="MLAGEN_MLA_KERNEL=sm90: no such kernel"):
        launched(inputs, launches, "sm90")


def test_a_paged_call_has_its_sequences(launches: list[Launch]) -> None:
    """A paged call passes its query offsets, and no top-k indices."""
    case = mla_case(FP8_DS_MLA, name="", seq_lens=(200, 9), q_lens=(2, 1), heads=5)
    problem = case.build("cpu")
    inputs = problem.inputs()

    values = launched(inputs, launches, "sm90").launches[0].values

    assert (values["num_seqs"], values["q_len"], values["heads"]) == (2, 0, 5)
    assert inputs.cum_seq_lens_q is not None
    assert values["cu_seqlens_q"] == inputs.cum_seq_lens_q.data_ptr()
    assert (values["topk"], values["topk_length"]) == (0, 0)
    assert (values["page_stride"], values["token_stride"]) == (64 * 656, 656)
    assert values["semaphores"] == inputs.workspace_buffer.data_ptr() + SEMAPHORES
    assert values["schedule_id"] == 0


def test_in_a_sparse_call_every_query_token_is_a_sequence(launches: list[Launch]) -> None:
    """Top-k indices are the block table of a query token; lengths are those of its request."""
    case = mla_case(FP8_DS_MLA, name="", seq_lens=(200, 90), q_len=3, top_k=70, heads=5)
    inputs = case.build("cpu").inputs()

    values = launched(inputs, launches, "sm90").launches[0].values

    assert (values["num_seqs"], values["q_len"], values["cu_seqlens_q"]) == (6, 1, 0)
    assert (values["sparse_num_seqs"], values["sparse_q_len"], values["topk"]) == (2, 3, 70)
    assert (values["block_tables_stride"], values["max_pages"]) == (70, 70)
    assert values["schedule_id"] == SCHEDULE_ID


def test_scales_of_e4m3_caches_are_passed(launches: list[Launch]) -> None:
    """Scales are passed as numbers, or as a tensor with its strides."""
    two = mla_case("bf16 over e4m3 with two scales", name="", seq_lens=(200,))
    many = mla_case("bf16 over e4m3 with scales for 128 elements", name="", seq_lens=(200,))

    numbers = _launch(two, launches, "sm90").values
    launches.clear()
    inputs = many.build("cpu").inputs()
    tensor = launched(inputs, launches, "sm90").launches[0].values

    assert numbers["latent_scale"] == pytest.approx(0.0371)
    assert numbers["rope_scale"] == pytest.approx(0.0543)
    assert isinstance(inputs.kv_scales, torch.Tensor)
    assert tensor["kv_scales"] == inputs.kv_scales.data_ptr()
    assert (tensor["scale_page_stride"], tensor["scale_token_stride"]) == (256, 4)
