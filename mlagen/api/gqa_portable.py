"""Grouped-query decode calls of the portable kernel, which serves every form on every GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES
from mlagen.api.calls import CombineCall, combine_call, scale_of, scratch_offset
from mlagen.api.gqa_inputs import GqaInputs
from mlagen.api.gqa_plan import plan_gqa_call, planned_facts
from mlagen.api.gqa_pointers import MASK_ALIGNMENT_BYTES, alignment_of, check_pointers
from mlagen.api.gqa_request import GqaRequest
from mlagen.engine import kernel_for
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import DecodePlan
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import GqaDecodeSpec
from mlagen.spec.kernel import packed_integers


@dataclass(frozen=True, kw_only=True)
class PortableGqaCall:
    """A form of arguments that is sound, with its kernels loaded and its launch planned."""

    request: GqaRequest
    plan: DecodePlan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    combine: CombineCall | None
    layout: bytes  # the integers of the decode kernel's parameters
    cache_alignment: int  # bytes

    def launch(self, inputs: GqaInputs, out: torch.Tensor, enable_pdl: bool) -> Sequence[Launch]:
        """Enqueue the kernels of one call of this form."""
        request = self.request
        query = inputs.query.data_ptr()
        key = inputs.key_cache.data_ptr()
        value = inputs.value_cache
        value_pointer = key + request.value_offset if value is None else value.data_ptr()
        workspace = inputs.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        mask = inputs.mask
        mask_pointer = mask.data_ptr() if mask is not None and request.mask_words else 0
        if (
            (query | workspace | out_pointer) % ALIGNMENT_BYTES
            or (key | value_pointer) % self.cache_alignment
            or mask_pointer % MASK_ALIGNMENT_BYTES
        ):
            check_pointers(inputs)
        key_scales = value_scales = 0
        if inputs.key_scales is not None:
            key_scales = inputs.key_scales.data_ptr()
            value_scales = key_scales + request.value_scale_offset
            if inputs.value_scales is not None:
                value_scales = inputs.value_scales.data_ptr()
        bmm1_tensor, bmm1_scale = scale_of(inputs.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(inputs.bmm2_scale) if request.takes_bmm2 else (0, 1.0)
        is_e4m3 = request.variant.out_dtype is DType.E4M3
        factor = inputs.out_e4m3_factor if is_e4m3 else inputs.out_16bit_factor
        sinks = inputs.sinks.data_ptr() if inputs.sinks is not None else 0
        combine = self.combine
        partial_lse = scratch if combine is None else scratch + combine.lse_offset
        made = launch(
            self.decode,
            self.plan.blocks,
            enable_pdl,
            query,
            key,
            value_pointer,
            key_scales,
            value_scales,
            inputs.block_tables.data_ptr(),
            inputs.seq_lens.data_ptr(),
            inputs.cum_seq_lens_q.data_ptr() if inputs.cum_seq_lens_q is not None else 0,
            mask_pointer,
            bmm1_tensor,
            bmm2_tensor,
            sinks,
            out_pointer,
            scratch,
            partial_lse,
            self.layout,
            bmm1_scale,
            bmm2_scale,
            request.score_factor,
            factor,
        )
        if combine is None:
            return (made,)
        combined = combine.launch(
            enable_pdl, scratch, bmm2_tensor, sinks, out_pointer, 0, bmm2_scale, factor, 1.0
        )
        return made, combined


def prepare_portable(inputs: GqaInputs, request: GqaRequest, index: int) -> PortableGqaCall:
    """Return how calls of the form of ``inputs`` are launched on GPU ``index``."""
    spec, plan = plan_gqa_call(**planned_facts(inputs, request, index))
    workspace, name = inputs.workspace_buffer, inputs.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    combine_spec = CombineSplitsSpec(
        arch=spec.arch, dtype=spec.variant.out_dtype, head_dim_vo=spec.variant.head_dim
    )
    return PortableGqaCall(
        request=request,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        combine=combine_call(
            combine_spec, plan, tokens=request.tokens, heads=request.heads, device=index
        ),
        layout=_layout(spec, request, plan),
        cache_alignment=alignment_of(inputs.key_cache),
    )


def _layout(spec: GqaDecodeSpec, request: GqaRequest, plan: DecodePlan) -> bytes:
    steps = ("page_stride", "token_stride", "head_stride")
    values = {
        "query_stride": request.query_stride,
        "query_head_stride": request.query_head_stride,
        "total_rows": request.tokens * request.heads,
        "requests": request.batch,
        "kv_heads": request.kv_heads,
        "group": request.group,
        "q_len": 0 if request.is_ragged else request.q_len,
        "mask_words": request.mask_words,
        "window": request.window,
        "max_pages": request.max_pages,
        "block_tables_stride": request.block_tables_stride,
        "num_pages": request.num_pages,
        "row_tiles": plan.row_tiles,
        "splits": plan.splits,
        "scores_take_bmm2": int(request.scores_take_bmm2),
    }
    for part in ("key", "value", "key_scale", "value_scale"):
        strides = getattr(request, f"{part}_strides")
        values |= {f"{part}_{step}": stride for step, stride in zip(steps, strides, strict=True)}
    return packed_integers(spec, values)
