"""MLA decode calls of the portable kernel, which serves every form on every GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES
from mlagen.api.calls import CombineCall, combine_call, scale_of, scratch_offset
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_plan import plan_call
from mlagen.api.mla_request import LSE_FACTORS, MlaRequest, check_pointers
from mlagen.engine import kernel_for
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import DecodePlan
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.kernel import packed_integers
from mlagen.spec.mla import MlaDecodeSpec


@dataclass(frozen=True, kw_only=True)
class PortableCall:
    """A form of arguments that is sound, with its kernels loaded and its launch planned."""

    request: MlaRequest
    plan: DecodePlan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    combine: CombineCall | None
    layout: bytes  # the integers of the decode kernel's parameters
    is_plain: bool  # none of what :class:`_RarePointers` names is used

    def launch(
        self, inputs: MlaInputs, out: torch.Tensor, lse: torch.Tensor | None, enable_pdl: bool
    ) -> Sequence[Launch]:
        """Enqueue the kernels of one call of this form."""
        request = self.request
        query = inputs.query.data_ptr()
        cache = inputs.kv_cache.data_ptr()
        tables = inputs.block_tables.data_ptr()
        workspace = inputs.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        query_rope = query + request.query_rope_offset
        rope_cache = cache + request.rope_cache_offset
        if self.is_plain:
            rare = _RarePointers(query_rope, rope_cache)
        else:
            rare = _rare_pointers(
                inputs,
                query_rope=query_rope,
                rope_cache=rope_cache,
                value_tables=tables + request.value_tables_offset,
            )
        query_rope, rope_cache, query_scales, value_cache, kv_scales = rare[:5]
        beginnings = query | query_rope | cache | rope_cache | value_cache | workspace | out_pointer
        if beginnings % ALIGNMENT_BYTES:
            check_pointers(inputs)
        bmm1_tensor, bmm1_scale = scale_of(inputs.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(inputs.bmm2_scale)
        sinks = inputs.sinks.data_ptr() if inputs.sinks is not None else 0
        lse_pointer = lse.data_ptr() if lse is not None else 0
        lse_factor = LSE_FACTORS[inputs.return_lse_base]
        combine = self.combine
        partial_lse = scratch if combine is None else scratch + combine.lse_offset
        made = launch(
            self.decode,
            self.plan.blocks,
            enable_pdl,
            query,
            query_rope,
            query_scales,
            cache,
            rope_cache,
            value_cache,
            kv_scales,
            tables,
            rare.value_tables,
            rare.table_starts,
            inputs.seq_lens.data_ptr(),
            inputs.cum_seq_lens_q.data_ptr() if inputs.cum_seq_lens_q is not None else 0,
            rare.top_k_lens,
            rare.bias,
            bmm1_tensor,
            bmm2_tensor,
            sinks,
            out_pointer,
            lse_pointer,
            scratch,
            partial_lse,
            self.layout,
            bmm1_scale,
            bmm2_scale,
            inputs.latent_scale,
            inputs.rope_scale,
            lse_factor,
        )
        if combine is None:
            return (made,)
        combined = combine.launch(
            enable_pdl,
            scratch,
            bmm2_tensor,
            sinks,
            out_pointer,
            lse_pointer,
            bmm2_scale,
            1.0,
            lse_factor,
        )
        return made, combined


class _RarePointers(NamedTuple):
    """Addresses of what few calls use, 0 where it is not used."""

    query_rope: int
    rope_cache: int
    query_scales: int = 0
    value_cache: int = 0
    kv_scales: int = 0
    value_tables: int = 0
    table_starts: int = 0
    top_k_lens: int = 0
    bias: int = 0


def prepare_portable(inputs: MlaInputs, request: MlaRequest, index: int) -> PortableCall:
    """Return how calls of the form of ``inputs`` are launched on GPU ``index``."""
    spec, plan = plan_call(
        device=index,
        variant=request.variant,
        batch=request.batch,
        q_len=request.q_len,
        tile_q_len=request.tile_q_len,
        tokens=request.tokens,
        heads=request.heads,
        longest_kv=request.top_k or int(inputs.max_seq_len),
    )
    workspace, name = inputs.workspace_buffer, inputs.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    combine_spec = CombineSplitsSpec(
        arch=spec.arch, dtype=spec.out_dtype, head_dim_vo=spec.head_dim_vo
    )
    return PortableCall(
        request=request,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        combine=combine_call(
            combine_spec, plan, tokens=request.tokens, heads=request.heads, device=index
        ),
        layout=_layout(inputs, request, spec, plan),
        is_plain=_is_plain(inputs),
    )


def _is_plain(inputs: MlaInputs) -> bool:
    rare = _rare_pointers(inputs, query_rope=0, rope_cache=0, value_tables=0)
    return not any(rare)


def _layout(inputs: MlaInputs, request: MlaRequest, spec: MlaDecodeSpec, plan: DecodePlan) -> bytes:
    values = {
        **request.strides,
        "total_rows": request.tokens * request.heads,
        "requests": request.batch,
        "heads": request.heads,
        "q_len": request.q_len,
        "max_pages": request.max_pages,
        "num_pages": request.num_pages,
        "row_tiles": plan.row_tiles,
        "splits": plan.splits,
        "top_k": request.top_k,
        "is_causal": int(inputs.is_causal),
        "scores_take_bmm2": int(inputs.scores_take_bmm2),
    }
    return packed_integers(spec, values)


def _rare_pointers(
    inputs: MlaInputs, *, query_rope: int, rope_cache: int, value_tables: int
) -> _RarePointers:
    """Return the addresses; the three given are those in tensors of other parts."""
    value_cache = _pointer(inputs.value_cache)
    return _RarePointers(
        query_rope=_pointer(inputs.query_rope) or query_rope,
        rope_cache=_pointer(inputs.rope_cache) or rope_cache,
        query_scales=_pointer(inputs.query_scales),
        value_cache=value_cache,
        kv_scales=_pointer(inputs.kv_scales),
        value_tables=value_tables if value_cache else 0,
        table_starts=_pointer(inputs.table_starts),
        top_k_lens=_pointer(inputs.top_k_lens),
        bias=_pointer(inputs.bias),
    )


def _pointer(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0
