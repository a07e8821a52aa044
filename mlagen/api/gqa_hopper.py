"""Grouped-query decode calls of the Hopper kernel: one launch, whatever the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES
from mlagen.api.calls import scale_of, scratch_offset
from mlagen.api.choice_log import decline
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_maps import GqaCacheForm, GqaCacheMaps, maps_of
from mlagen.api.gqa_plan import plan_gqa_hopper_call, planned_facts
from mlagen.api.gqa_pointers import MASK_ALIGNMENT_BYTES, check_pointers
from mlagen.api.gqa_request import MOST_TOKENS, GqaRequest
from mlagen.engine import kernel_for
from mlagen.errors import DriverError, UnsupportedError
from mlagen.runtime.counters import counters_of
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan_gqa_hopper import GqaHopperPlan, line_fits
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import HEAD_DIMS, GqaVariant
from mlagen.spec.gqa_hopper import GqaHopperSpec
from mlagen.spec.kernel import packed_integers

_COVERED = (
    f"covered: sm_90a, cache as the query or e4m3, head_dim {', '.join(map(str, HEAD_DIMS))}, "
    f"page_size a multiple of 16, strides of the cache below 2^40 bytes"
)


@dataclass(frozen=True, kw_only=True)
class HopperGqaCall:
    """A form of arguments that is sound, with its kernel loaded and its launch planned."""

    request: GqaRequest
    plan: GqaHopperPlan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    maps: GqaCacheMaps
    layout: bytes  # the integers of the parameters

    def launch(self, inputs: GqaInputs, out: torch.Tensor, enable_pdl: bool) -> Sequence[Launch]:
        """Enqueue the kernel of one call of this form."""
        request, plan = self.request, self.plan
        query = inputs.query.data_ptr()
        beginnings = _beginnings(inputs, request)
        workspace = inputs.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        mask = inputs.mask
        mask_pointer = mask.data_ptr() if mask is not None and request.mask_words else 0
        together = query | beginnings[0] | beginnings[1] | workspace | out_pointer
        if together % ALIGNMENT_BYTES or mask_pointer % MASK_ALIGNMENT_BYTES:
            check_pointers(inputs)
        bmm1_tensor, bmm1_scale = scale_of(inputs.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(inputs.bmm2_scale) if request.takes_bmm2 else (0, 1.0)
        is_e4m3 = request.variant.out_dtype is DType.E4M3
        made = launch(
            self.decode,
            plan.blocks,
            enable_pdl,
            self.maps[beginnings],
            query,
            beginnings[1],
            inputs.block_tables.data_ptr(),
            inputs.seq_lens.data_ptr(),
            inputs.cum_seq_lens_q.data_ptr() if inputs.cum_seq_lens_q is not None else 0,
            mask_pointer,
            bmm1_tensor,
            bmm2_tensor,
            inputs.sinks.data_ptr() if inputs.sinks is not None else 0,
            out_pointer,
            scratch,
            scratch + plan.partial_rows_offset,
            counters_of(self.decode.device, workspace),
            self.layout,
            bmm1_scale,
            bmm2_scale,
            request.score_factor,
            inputs.out_e4m3_factor if is_e4m3 else inputs.out_16bit_factor,
        )
        return (made,)


def prepare_hopper(
    inputs: GqaInputs, request: GqaRequest, index: int, *, is_forced: bool
) -> HopperGqaCall | None:
    """Return how calls of the form of ``inputs`` are launched on GPU ``index``.

    None if the kernel does not cover them, or the driver makes no map of such a cache.

    Raises
    ------
    UnsupportedError
        Instead of returning None, if the kernel is asked for by name.
    """
    facts = planned_facts(inputs, request, index)
    planned = plan_gqa_hopper_call(**facts)
    if planned is None:
        decline(lambda: not_covered(index, request.variant), is_forced=is_forced)
        return None
    most_tokens = request.max_pages * request.variant.page_size
    if not line_fits(*planned, most_tokens):  # tiles of several heads have fewer tokens
        planned = plan_gqa_hopper_call(**facts, has_one_head=True) or planned
    spec, plan = planned
    if not line_fits(spec, plan, most_tokens):
        too_long = UnsupportedError(
            f"MLAGEN_GQA_KERNEL=hopper: expected fewer than 2^32 tiles of {spec.tile_tokens} "
            f"tokens in all requests, kv heads and tiles of rows, times blocks, got "
            f"{plan.all_units * plan.team_size} tiles of rows of up to {most_tokens} tokens "
            f"and {plan.blocks} blocks"
        )
        decline(lambda: too_long, is_forced=is_forced)
        return None
    maps = maps_of(
        GqaCacheForm(
            spec=spec,
            num_pages=request.num_pages,
            kv_heads=request.kv_heads,
            key_strides=request.key_strides,
            value_strides=request.value_strides,
        )
    )
    try:
        _ = maps[_beginnings(inputs, request)]
    except DriverError as error:
        no_map = UnsupportedError(f"MLAGEN_GQA_KERNEL=hopper: {error}; {_COVERED}")
        decline(lambda: no_map, is_forced=is_forced)
        return None
    workspace, name = inputs.workspace_buffer, inputs.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    return HopperGqaCall(
        request=request,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        maps=maps,
        layout=_layout(spec, request, plan),
    )


def not_covered(index: int, variant: GqaVariant) -> UnsupportedError:
    """Return what is raised where the kernel is asked for by name and covers no such call."""
    return UnsupportedError(
        f"MLAGEN_GQA_KERNEL=hopper: no such kernel for {arch_of_device(index)}, "
        f"query {variant.query_dtype}, cache {variant.kv_dtype}, head_dim {variant.head_dim}, "
        f"page_size {variant.page_size}; {_COVERED}"
    )


def _beginnings(inputs: GqaInputs, request: GqaRequest) -> tuple[int, int]:
    """Return where keys and values begin."""
    key = inputs.key_cache.data_ptr()
    if inputs.value_cache is None:
        return key, key + request.value_offset
    return key, inputs.value_cache.data_ptr()


def _layout(spec: GqaHopperSpec, request: GqaRequest, plan: GqaHopperPlan) -> bytes:
    page_stride, token_stride, head_stride = request.value_strides
    values = {
        "query_stride": request.query_stride,
        "query_head_stride": request.query_head_stride,
        "value_page_stride": page_stride,
        "value_token_stride": token_stride,
        "value_head_stride": head_stride,
        "tokens": request.tokens,
        "requests": request.batch,
        "kv_heads": request.kv_heads,
        "group": request.group,
        "q_len": 0 if request.is_ragged else request.q_len,
        "row_tiles": plan.row_tiles,
        "units": plan.units,
        "teams": plan.teams,
        "team_size": plan.team_size,
        "mask_words": request.mask_words,
        # Any token is in the window that is as wide as numbers go.
        "window": request.window or MOST_TOKENS,
        "max_pages": request.max_pages,
        "most_tokens": min(request.max_pages * request.variant.page_size, MOST_TOKENS),
        "block_tables_stride": request.block_tables_stride,
        "num_pages": request.num_pages,
        "scores_take_bmm2": int(request.scores_take_bmm2),
    }
    return packed_integers(spec, values)
