"""Kernel parameters of grouped-query calls; needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.families.common.plan_sm80 import Sm80Plan
from mlagen.families.gqa import dispatch as gqa_call
from mlagen.families.gqa.problem import MAX_TOKENS, check_problem
from tests.families.gqa_launches import args_of, launches_of
from tests.families.launches import scratch_of
from tests.problems.gqa import GqaCase
from tests.problems.problem import E4M3

UNIFORM = GqaCase(name="", seq_lens=(70, 3), q_len=2, mask="random", sink=3.0, window=50)
STACKED = GqaCase(name="", seq_lens=(70, 3), cache_layout="stacked", layout="HND")
RAGGED = GqaCase(name="", seq_lens=(70, 3), q_lens=(1, 4), kv="e4m3", out_dtype=E4M3)
NVFP4 = GqaCase(name="", seq_lens=(70, 3), kv="nvfp4", cache_layout="stacked")


def test_a_call_without_splits_launches_one_kernel_with_all_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pointers, strides, sizes and scales are those of the arguments."""
    scale = torch.tensor(2.0)
    inputs = args_of(UNIFORM, monkeypatch, bmm1_scale=0.25, bmm2_scale=scale, max_seq_len=16)

    call, out, launches = launches_of(inputs, monkeypatch)

    ((family, blocks, enable_pdl, values),) = launches
    assert (family, blocks, enable_pdl) == ("gqa_sm80", 4, True)
    assert inputs.mask is not None
    assert inputs.sinks is not None
    assert inputs.value_cache is not None
    assert values == {
        "query": inputs.query.data_ptr(),
        "key_cache": inputs.key_cache.data_ptr(),
        "value_cache": inputs.value_cache.data_ptr(),
        "key_scales": 0,
        "value_scales": 0,
        "block_tables": inputs.block_tables.data_ptr(),
        "seq_lens": inputs.seq_lens.data_ptr(),
        "cu_seqlens_q": 0,
        "kv_indptr": 0,
        "draft_mask": inputs.mask.data_ptr(),
        "bmm1_scale_tensor": 0,
        "bmm2_scale_tensor": scale.data_ptr(),
        "sinks": inputs.sinks.data_ptr(),
        "out": out.data_ptr(),
        "lse": 0,
        "partial_out": scratch_of(inputs.workspace_buffer, 0),
        "partial_lse": scratch_of(inputs.workspace_buffer, 0),
        "query_stride": 8 * 128,
        "query_head_stride": 128,
        **{
            f"{part}_{step}": size * 2
            for part in ("key", "value")
            for step, size in (
                ("page_stride", 16 * 2 * 128),
                ("token_stride", 2 * 128),
                ("head_stride", 128),
            )
        },
        **{
            f"{part}_scale_{step}": 0
            for part in ("key", "value")
            for step in ("page_stride", "token_stride", "head_stride")
        },
        "total_rows": 32,
        "num_seqs": 2,
        "kv_heads": 2,
        "group_size": 4,
        "q_len": 2,
        "mask_words": 1,
        "window": 50,
        "max_pages": inputs.block_tables.shape[1],
        "block_tables_stride": inputs.block_tables.stride(0),
        "num_pages": len(inputs.key_cache),
        "row_tiles": 1,
        "num_splits": 1,
        "is_causal": 1,
        "bmm2_scales_scores": 0,
        "bmm1_scale": 0.25,
        "bmm2_scale": 0.0,
        "score_factor": 1.0,
        "lse_factor": 1.0,
        "output_factor": 1.0,
    }
    assert call.plan.workspace_bytes == 0


def test_a_split_call_stores_partial_rows_and_their_lse_for_the_combine_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both kernels have the same addresses of partial rows and the same output factor."""
    workspace = torch.zeros(1 << 22)
    inputs = args_of(
        RAGGED, monkeypatch, max_seq_len=50_000, workspace_buffer=workspace, bmm2_scale=0.5
    )

    call, out, launches = launches_of(inputs, monkeypatch)

    (first, _, _, decode), (second, blocks, _, combine) = launches
    assert (first, second) == ("gqa_sm80", "combine")
    assert isinstance(call.plan, Sm80Plan)
    partial_rows = call.plan.splits * 5 * 8
    assert call.plan.splits > 1
    scratch = scratch_of(workspace, partial_rows * 129 * 4)
    assert decode["partial_out"] == scratch
    assert decode["partial_lse"] == scratch + partial_rows * 128 * 4
    assert call.plan.workspace_bytes == partial_rows * 129 * 4
    assert blocks == 5 * 8
    shared = (
        "partial_out",
        "partial_lse",
        "out",
        "num_splits",
        "total_rows",
        "bmm2_scale",
        "sinks",
    )
    assert {name: combine[name] for name in shared} == {name: decode[name] for name in shared}
    assert combine["output_factor"] == decode["output_factor"] == 1.0
    assert (combine["heads"], combine["lse"], combine["out"]) == (8, 0, out.data_ptr())
    assert (decode["q_len"], decode["num_seqs"], decode["draft_mask"]) == (0, 2, 0)
    assert inputs.cum_seq_lens_q is not None
    assert decode["cu_seqlens_q"] == inputs.cum_seq_lens_q.data_ptr()


def test_values_in_the_tensor_of_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a stacked cache values have an offset of one axis, and the strides of the layout."""
    inputs = args_of(STACKED, monkeypatch)

    _, _, launches = launches_of(inputs, monkeypatch)

    values = launches[0][3]
    both = inputs.key_cache
    assert values["value_cache"] == both[:, 1].data_ptr()
    strides = [values[f"value_{step}_stride"] for step in ("page", "token", "head")]
    assert strides == [2 * 2 * 16 * 128 * 2, 128 * 2, 16 * 128 * 2]


def test_scales_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVFP4 scales have separate pointers and strides, in bytes."""
    inputs = args_of(NVFP4, monkeypatch)

    _, _, launches = launches_of(inputs, monkeypatch)

    values = launches[0][3]
    scales = inputs.key_scales
    assert scales is not None
    assert values["key_scales"] == scales.data_ptr()
    assert values["value_scales"] == scales[:, 1].data_ptr()
    strides = [values[f"key_scale_{step}_stride"] for step in ("page", "token", "head")]
    assert strides == [2 * 16 * 2 * 8, 2 * 8, 8]
    assert values["key_token_stride"] == 2 * 64


def test_a_window_of_the_whole_table_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets no window that could overflow its positions."""
    inputs = args_of(UNIFORM, monkeypatch, window=2**31 - 1)

    _, _, launches = launches_of(inputs, monkeypatch)

    assert launches[0][3]["window"] == MAX_TOKENS


@pytest.mark.parametrize(
    ("window", "expected"), [(MAX_TOKENS, MAX_TOKENS), (0x7FFEFFFF, 0x7FFEFFFF)]
)
def test_a_window_of_the_maximum_length_is_dropped(
    window: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is dropped at the kernel's maximum, even if the table has more tokens."""
    tables = torch.zeros(2, 2**31 // 256, dtype=torch.int32)
    case = replace(UNIFORM, page_size=256)
    inputs = args_of(case, monkeypatch, window=window, block_tables=tables)

    assert check_problem(inputs).window == expected


def test_a_workspace_that_is_too_small_is_rejected_with_both_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The message names the required and the given size."""
    inputs = args_of(RAGGED, monkeypatch, max_seq_len=50_000)

    with pytest.raises(ArgumentError, match=r"workspace_buffer: expected [0-9]+ bytes") as e:
        launches_of(inputs, monkeypatch)

    assert str(e.value).endswith("for this call, got 1024 bytes")


def test_no_query_tokens_launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without query tokens have an empty output."""
    inputs = args_of(RAGGED, monkeypatch)
    ends = torch.zeros(3, dtype=torch.int32)

    _, out, launches = launches_of(
        inputs._replace(query=inputs.query[:0], cum_seq_lens_q=ends, out=None), monkeypatch
    )

    assert launches == []
    assert tuple(out.shape) == (0, 8, 128)


@pytest.mark.parametrize(
    ("scale", "shown"), [(1e300, "1e+300"), (10**400, "an int of 1329 bits")], ids=["float", "int"]
)
def test_a_number_beyond_float32_is_rejected_at_a_cached_call(
    scale: float, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached call rejects an invalid float too, though signatures contain no floats."""
    inputs = args_of(STACKED, monkeypatch)
    call, _, _ = launches_of(inputs, monkeypatch)

    with pytest.raises(ArgumentError) as caught:
        gqa_call.GQA.launch(call, inputs._replace(bmm1_scale=scale), enable_pdl=True)

    assert str(caught.value) == f"bmm1_scale: expected a number that float32 can hold, got {shown}"
