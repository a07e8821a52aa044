"""Kernel parameters of MLA calls; needs no GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError
from mlagen.families.mla import dispatch as mla_call
from mlagen.families.mla.launch_sm80 import MlaSm80Launcher
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm80 import MlaSm80Spec
from tests.families.launches import Launch, launched, scratch_of
from tests.families.mla.conftest import E4M3, RAGGED, UNIFORM


def test_a_call_without_splits_launches_one_kernel_with_all_parameters(
    launches: list[Launch],
) -> None:
    """Pointers, strides, sizes and scales are those of the arguments."""
    inputs = UNIFORM.build("cpu").inputs(
        bmm1_scale=0.25, bmm2_scale=torch.tensor(2.0), max_seq_len=32
    )

    call, out, ((family, blocks, enable_pdl, values),) = launched(inputs, launches)

    assert (family, blocks, enable_pdl) == ("mla_sm80", 2, True)
    assert isinstance(inputs.bmm2_scale, torch.Tensor)
    assert inputs.sinks is not None
    unused: tuple[str, ...] = (
        "query_scales",
        "value_cache",
        "kv_scales",
        "value_tables",
        "kv_indptr",
    )
    unused += ("cu_seqlens_q", "topk_length", "bias", "bmm1_scale_tensor", "lse")
    strides = ("scale_page_stride", "scale_token_stride", "bias_stride", "bias_head_stride")
    expected: dict[str, float] = {
        **dict.fromkeys((*unused, *strides, "topk", "bmm2_scales_scores"), 0),
        "query": inputs.query.data_ptr(),
        "query_rope": inputs.query.data_ptr() + 1024,
        "cache": inputs.kv_cache.data_ptr(),
        "rope_cache": inputs.kv_cache.data_ptr() + 1024,
        "block_tables": inputs.block_tables.data_ptr(),
        "seq_lens": inputs.seq_lens.data_ptr(),
        "bmm2_scale_tensor": inputs.bmm2_scale.data_ptr(),
        "sinks": inputs.sinks.data_ptr(),
        "out": out.data_ptr(),
        "partial_out": scratch_of(inputs.workspace_buffer, 0),
        "partial_lse": scratch_of(inputs.workspace_buffer, 0),
        "query_stride": 16 * 576 * 2,
        "query_head_stride": 576 * 2,
        "query_rope_stride": 16 * 576 * 2,
        "query_rope_head_stride": 576 * 2,
        "page_stride": 64 * 576 * 2,
        "token_stride": 576 * 2,
        "rope_page_stride": 64 * 576 * 2,
        "rope_token_stride": 576 * 2,
        "total_rows": 32,
        "num_seqs": 2,
        "heads": 16,
        "q_len": 1,
        "max_pages": inputs.block_tables.shape[1],
        "block_tables_stride": inputs.block_tables.stride(0),
        "num_pages": len(inputs.kv_cache),
        "row_tiles": 1,
        "num_splits": 1,
        "is_causal": 1,
        "bmm1_scale": 0.25,
        "bmm2_scale": 0.0,
        "latent_scale": 1.0,
        "rope_scale": 1.0,
        "lse_factor": 1.0,
    }
    assert values == expected
    assert call.plan.workspace_bytes == 0


def test_a_split_call_stores_partial_rows_and_their_lse_for_the_combine_kernel(
    launches: list[Launch],
) -> None:
    """Both kernels have the same addresses of partial rows and the same LSE factor."""
    lse = torch.zeros(5, 16)
    inputs = RAGGED.build("cpu").inputs(
        max_seq_len=50_000, lse=lse, return_lse=True, return_lse_base="basee"
    )

    call, out, (first, second) = launched(inputs, launches)

    assert isinstance(call, MlaSm80Launcher)
    decode, combine = first.values, second.values
    assert (first.family, second.family) == ("mla_sm80", "combine")
    scratch = scratch_of(inputs.workspace_buffer, call.plan.workspace_bytes)
    partial_rows = call.plan.splits * 5 * 16
    assert call.plan.splits > 1
    assert decode["q_len"] == 0
    assert decode["partial_out"] == scratch
    assert decode["partial_lse"] == scratch + partial_rows * 512 * 4
    assert call.plan.workspace_bytes == partial_rows * 513 * 4
    assert second.blocks == 5 * 16 * 4
    shared = ("partial_out", "partial_lse", "out", "lse", "num_splits", "total_rows", "lse_factor")
    assert {name: combine[name] for name in shared} == {name: decode[name] for name in shared}
    assert combine["lse_factor"] == math.log(2)
    assert (combine["lse"], combine["out"]) == (lse.data_ptr(), out.data_ptr())
    assert (combine["heads"], combine["output_factor"]) == (16, 1.0)


def test_every_query_token_of_a_sparse_call_has_its_ctas(launches: list[Launch]) -> None:
    """A tile of a sparse call has the heads of one query token, as each has its own indices."""
    inputs = replace(UNIFORM, top_k=70, q_len=3, heads=20).build("cpu").inputs()

    call, _, _ = launched(inputs, launches)

    assert isinstance(call, MlaSm80Launcher)
    assert isinstance(call.decode.spec, MlaSm80Spec)
    assert call.decode.spec.tile.block_m == 32
    assert launches[0].blocks == 2 * 3 * call.plan.splits


def test_the_output_of_e4m3_is_combined_as_bf16(launches: list[Launch]) -> None:
    """The combine kernel writes bf16 for an e4m3 query."""
    inputs = replace(UNIFORM, dtype=E4M3).build("cpu").inputs(max_seq_len=50_000)

    call, out, _ = launched(inputs, launches)

    assert out.dtype is torch.bfloat16
    assert isinstance(call, MlaSm80Launcher)
    assert call.combine is not None
    assert getattr(call.combine.spec, "dtype", None) is DType.BF16


@pytest.mark.parametrize("scale", [1e39, 10**400], ids=["float", "int"])
def test_a_scale_beyond_float32_is_rejected_at_a_cached_call(
    scale: float, launches: list[Launch]
) -> None:
    """A cached call rejects an invalid float by name, and launches nothing."""
    inputs = UNIFORM.build("cpu").inputs()
    call, _, _ = launched(inputs, launches)
    launches.clear()

    with pytest.raises(
        ArgumentError, match=r"^bmm1_scale: expected a number that float32 can hold"
    ):
        mla_call.MLA.launch(call, inputs._replace(bmm1_scale=scale), enable_pdl=True)

    assert launches == []


def test_a_query_of_no_tokens_launches_nothing(launches: list[Launch]) -> None:
    """Ragged requests without any query tokens launch nothing."""
    inputs = replace(RAGGED, q_lens=(1, 0)).build("cpu").inputs()
    empty = inputs._replace(query=inputs.query[:0], cum_seq_lens_q=torch.zeros(3).int())

    launched(empty, launches)

    assert launches == []


def test_a_workspace_too_small_is_rejected_with_both_sizes(launches: list[Launch]) -> None:
    """A workspace one byte below the plan's size is rejected."""
    inputs = UNIFORM.build("cpu").inputs(max_seq_len=50_000)
    call, _, _ = launched(inputs, launches)
    needed = call.plan.workspace_bytes
    small = inputs._replace(workspace_buffer=inputs.workspace_buffer[: needed - 1])
    launches.clear()

    with pytest.raises(ArgumentError) as caught:
        launched(small, launches)

    message = (
        f"workspace_buffer: expected {needed} bytes or more for this call, got {needed - 1} bytes"
    )
    assert str(caught.value) == message
    assert launches == []


def test_cpu_tensors_need_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requested kernel does not affect calls on CPU tensors."""
    problem = UNIFORM.build("cpu")
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "sm90")
    current_settings.cache_clear()

    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments())

    assert isinstance(out, torch.Tensor)
    problem.check(out)


def test_an_unhashable_value_is_rejected_by_name() -> None:
    """A list in place of a number is rejected by a check, without a TypeError of the cache."""
    arguments = UNIFORM.build("cpu").arguments(kv_lora_rank=[512])

    with pytest.raises(ArgumentError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    assert str(caught.value) == "kv_lora_rank: expected an int, 0 or more, got [512]"
