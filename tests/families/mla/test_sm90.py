"""Parameters of the sm90 MLA kernel; needs no GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.mla import dispatch as mla_call
from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.launch_sm90 import MlaSm90Launcher
from mlagen.families.mla.problem import check_problem
from mlagen.runtime.tensor_map import TiledTensor
from mlagen.settings import current_settings
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.families.launches import (
    SCHEDULE_ID,
    SEMAPHORES,
    Launch,
    launched,
    scratch_of,
)
from tests.families.mla.conftest import RAGGED, UNIFORM
from tests.problems.mla import MlaCase


def maps_of(inputs: MlaArgs, spec: MlaSm90Spec) -> mla_maps.Maps:
    """Return the maps of a cache in one tensor."""
    cache = inputs.kv_cache
    page_stride, token_stride = (stride * 2 for stride in cache.stride()[:2])
    signature = mla_maps.TensorMapLayout(
        spec=spec,
        num_pages=len(cache),
        page_stride=page_stride,
        token_stride=token_stride,
        rope_page_stride=page_stride,
        rope_token_stride=token_stride,
    )
    return mla_maps.CacheMaps(signature)[cache.data_ptr(), cache.data_ptr() + 1024]


def test_a_call_launches_one_kernel_with_all_parameters(launches: list[Launch]) -> None:
    """Maps, pointers, strides, sizes and scales are those of arguments and plan."""
    inputs = UNIFORM.build("cpu").inputs(
        bmm1_scale=0.25, bmm2_scale=torch.tensor(2.0), max_seq_len=70
    )

    call, out, ((family, blocks, enable_pdl, values),) = launched(inputs, launches, "sm90")

    # Two requests of 2 KV blocks with a fixed overhead of 2 make 8, so 4 ranges.
    assert (family, blocks, enable_pdl) == ("mla_sm90", 4, True)
    assert isinstance(inputs.bmm2_scale, torch.Tensor)
    assert inputs.sinks is not None
    assert isinstance(call.decode.spec, MlaSm90Spec)
    maps = maps_of(inputs, call.decode.spec).packed
    scratch = scratch_of(inputs.workspace_buffer, 2 * 4 * 16 * (512 * 2 + 16))
    unused = ("kv_indptr", "cu_seqlens_q", "bmm1_scale_tensor", "lse")
    expected: dict[str, Any] = {
        **dict.fromkeys((*unused, "separate_rope", "bmm2_scales_scores"), 0),
        "latent_map": maps[:128],
        "rope_map": maps[128:256],
        "kv_map": maps[256:],
        "query": inputs.query.data_ptr(),
        "query_rope": inputs.query.data_ptr() + 1024,
        "cache": inputs.kv_cache.data_ptr(),
        "block_tables": inputs.block_tables.data_ptr(),
        "seq_lens": inputs.seq_lens.data_ptr(),
        "bmm2_scale_tensor": inputs.bmm2_scale.data_ptr(),
        "sinks": inputs.sinks.data_ptr(),
        "out": out.data_ptr(),
        "partial_out": scratch,
        "partial_states": scratch + 2 * 4 * 16 * 512 * 2,
        "semaphores": inputs.workspace_buffer.data_ptr() + SEMAPHORES,
        "query_stride": 16 * 576 * 2,
        "query_head_stride": 576 * 2,
        "query_rope_stride": 16 * 576 * 2,
        "query_rope_head_stride": 576 * 2,
        "page_stride": 64 * 576 * 2,
        "token_stride": 576 * 2,
        "total_rows": 32,
        "num_seqs": 2,
        "heads": 16,
        "q_len": 1,
        "max_pages": inputs.block_tables.shape[1],
        "block_tables_stride": inputs.block_tables.stride(0),
        "num_pages": len(inputs.kv_cache),
        "num_cta_groups": 4,
        "cta_group_size": 1,
        "is_causal": 1,
        "schedule_id": SCHEDULE_ID,
        "bmm1_scale": 0.25,
        "bmm2_scale": 0.0,
        "lse_factor": 1.0,
    }
    assert values == expected
    assert call.plan.workspace_bytes == 2 * 4 * 16 * (512 * 2 + 16)


# Cases with the parameters that differ from a plain call, as functions of the arguments.
RARE: dict[str, tuple[MlaCase, dict[str, Any]]] = {
    "parts of query and cache": (
        replace(UNIFORM, separate_rope=True, flat_tables=True, q_len=2, is_causal=False),
        {
            "query_rope": lambda i: i.query_rope.data_ptr(),
            "query_stride": 16 * 512 * 2,
            "query_rope_stride": 16 * 64 * 2,
            "query_rope_head_stride": 64 * 2,
            "separate_rope": 1,
            "page_stride": 64 * 512 * 2,
            "kv_indptr": lambda i: i.kv_indptr.data_ptr(),
            "block_tables_stride": 0,
            "max_pages": 11,
            "is_causal": 0,
            "q_len": 2,
            "schedule_id": 0,
        },
    ),
    "ragged queries": (
        RAGGED,
        {
            "cu_seqlens_q": lambda i: i.cum_seq_lens_q.data_ptr(),
            "q_len": 0,
            "total_rows": 80,
            "schedule_id": 0,
        },
    ),
    "context parallel": (
        replace(UNIFORM, cp_world=4, cp_rank=3),
        {
            "causal_seqlens_kv_global": lambda i: i.causal_seqlens_kv_global.data_ptr(),
            "cp_world": 4,
            "cp_rank": 3,
            "schedule_id": 0,
        },
    ),
    "fp16, of a small page": (
        replace(UNIFORM, dtype=torch.float16, page_size=16),
        {"page_stride": 16 * 576 * 2, "separate_rope": 0},
    ),
    "scores that take a scale of values": (
        replace(UNIFORM, bmm2_scales_scores=True),
        {"bmm2_scales_scores": 1},
    ),
}


@pytest.mark.parametrize(("case", "expected"), RARE.values(), ids=RARE)
def test_rare_arguments_set_their_parameters(
    case: MlaCase, expected: dict[str, Any], launches: list[Launch]
) -> None:
    """Each rare argument that the kernel supports sets its parameters, and no others."""
    inputs = case.build("cpu").inputs()

    launched(inputs, launches, "sm90")

    wanted = {name: value(inputs) if callable(value) else value for name, value in expected.items()}
    assert {name: launches[0].values[name] for name in expected} == wanted


@pytest.mark.parametrize(("requests", "schedule_id"), [(256, SCHEDULE_ID), (257, 0)])
def test_schedules_are_cached_for_at_most_one_request_per_thread(
    requests: int, schedule_id: int, launches: list[Launch]
) -> None:
    """A batch above the number of threads has schedule id 0, without cached metadata."""
    inputs = MlaCase(name="", seq_lens=(3,) * requests, heads=16).build("cpu").inputs()

    launched(inputs, launches, "sm90")

    assert launches[0].values["schedule_id"] == schedule_id


def test_parts_in_one_row_have_one_map(launches: list[Launch]) -> None:
    """Views of one cache are detected by address, and separate tensors too."""
    inputs = UNIFORM.build("cpu").inputs()
    cache = inputs.kv_cache
    views = inputs._replace(kv_cache=cache[..., :512], rope_cache=cache[..., 512:])
    other = cache.clone()

    launched(inputs, launches, "sm90")
    launched(views, launches, "sm90")
    launched(views._replace(rope_cache=other[..., 512:]), launches, "sm90")

    one_tensor, two_views, separate = (launch.values for launch in launches)
    names = ("latent_map", "rope_map", "kv_map", "separate_rope")
    assert {name: two_views[name] for name in names} == {name: one_tensor[name] for name in names}
    assert separate["separate_rope"] == 1
    assert separate["latent_map"] == one_tensor["latent_map"]
    assert separate["rope_map"] != one_tensor["rope_map"]


def test_an_lse_has_its_pointer_and_factor(launches: list[Launch]) -> None:
    """The LSE pointer is the given tensor's, and the factor that of the base."""
    lse = torch.zeros(2, 16)
    inputs = UNIFORM.build("cpu").inputs(lse=lse, return_lse=True, return_lse_base="basee")

    launched(inputs, launches, "sm90")

    assert launches[0].values["lse"] == lse.data_ptr()
    assert launches[0].values["lse_factor"] == math.log(2)


def test_a_query_of_no_tokens_launches_nothing_and_needs_no_workspace(
    launches: list[Launch],
) -> None:
    """Ragged requests without any query tokens launch nothing."""
    inputs = replace(RAGGED, q_lens=(1, 0)).build("cpu").inputs()
    empty = inputs._replace(
        query=inputs.query[:0],
        cum_seq_lens_q=torch.zeros(3).int(),
        workspace_buffer=inputs.workspace_buffer[:0],
    )

    launched(empty, launches, "sm90")

    assert launches == []


def test_a_workspace_too_small_is_rejected_with_both_sizes(launches: list[Launch]) -> None:
    """A workspace one byte below the plan's size is rejected."""
    inputs = UNIFORM.build("cpu").inputs(max_seq_len=50_000)
    call, _, _ = launched(inputs, launches, "sm90")
    needed = call.plan.workspace_bytes
    small = inputs._replace(workspace_buffer=inputs.workspace_buffer[: needed - 1])
    launches.clear()

    with pytest.raises(ArgumentError) as caught:
        launched(small, launches, "sm90")

    message = (
        f"workspace_buffer: expected {needed} bytes or more for this call, got {needed - 1} bytes"
    )
    assert str(caught.value) == message
    assert launches == []


@pytest.mark.usefixtures("launches")
def test_a_schedule_beyond_32_bits_is_rejected_or_uses_the_sm80_kernel() -> None:
    """2^31 KV blocks exceed the linear block index, so the sm80 kernel is used unless forced."""
    inputs = UNIFORM.build("cpu").inputs()
    request = replace(check_problem(inputs), device=torch.device("cuda", 0), max_pages=2**30)
    settings = current_settings()

    with pytest.raises(UnsupportedError, match=r"fewer than 2\^31 KV blocks of 64 tokens"):
        mla_call.plan_call(inputs, request, replace(settings, mla_kernel="sm90"))

    assert not isinstance(mla_call.plan_call(inputs, request, settings), MlaSm90Launcher)


def test_a_pointer_that_is_not_aligned_is_rejected_by_name(launches: list[Launch]) -> None:
    """A cached call checks pointers before it encodes maps."""
    inputs = UNIFORM.build("cpu").inputs()
    call, _, _ = launched(inputs, launches, "sm90")
    launches.clear()
    shifted = torch.zeros(inputs.kv_cache.numel() + 1, dtype=torch.bfloat16)[1:]

    with pytest.raises(ArgumentError, match=r"^kv_cache"):
        call.launch(
            inputs._replace(kv_cache=shifted.view_as(inputs.kv_cache)),
            False,
            torch.empty(2, 1, 16, 512, dtype=torch.bfloat16),
        )

    assert launches == []


def test_a_cached_call_encodes_no_map(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maps are encoded when a call is prepared, and once for each other cache."""
    inputs = UNIFORM.build("cpu").inputs()
    call, out, _ = launched(inputs, launches, "sm90")
    encoded: list[int] = []

    def encode(_: TiledTensor, address: int) -> bytes:
        encoded.append(address)
        return bytes(128)

    monkeypatch.setattr(mla_maps, "encode", encode)
    call.launch(inputs, False, out)
    assert encoded == []

    other = inputs.kv_cache.clone()
    call.launch(inputs._replace(kv_cache=other), False, out)

    assert encoded == [other.data_ptr(), other.data_ptr() + 1024, other.data_ptr()]
