"""MLA decode calls of the Hopper kernel for rows of 8 bits whose values are multiplied as fp16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES
from mlagen.api.calls import scale_of, scratch_offset
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_plan import number_of_plan
from mlagen.api.mla_request import LSE_FACTORS, MlaRequest, check_pointers
from mlagen.engine import kernel_for
from mlagen.runtime.counters import counters_of
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan_hopper import HopperPlan
from mlagen.spec.kernel import packed_integers
from mlagen.spec.mla_hopper_packed import MlaHopperPackedSpec


@dataclass(frozen=True, kw_only=True)
class PackedCall:
    """A form of arguments that is sound, with its kernel loaded and its launch planned."""

    request: MlaRequest
    plan: HopperPlan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    layout: bytes  # the integers of the kernel's parameters
    lse_factor: float

    def launch(
        self, inputs: MlaInputs, out: torch.Tensor, lse: torch.Tensor | None, enable_pdl: bool
    ) -> Sequence[Launch]:
        """Enqueue the kernel of one call of this form."""
        request, plan = self.request, self.plan
        query = inputs.query.data_ptr()
        cache = inputs.kv_cache.data_ptr()
        workspace = inputs.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        query_rope = _pointer(inputs.query_rope) or query + request.query_rope_offset
        rope_cache = _pointer(inputs.rope_cache) or cache + request.rope_cache_offset
        beginnings = query | query_rope | cache | rope_cache | workspace | out_pointer
        if beginnings % ALIGNMENT_BYTES:
            check_pointers(inputs)
        ends = _pointer(inputs.cum_seq_lens_q)
        bmm1_tensor, bmm1_scale = scale_of(inputs.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(inputs.bmm2_scale)
        made = launch(
            self.decode,
            plan.blocks,
            enable_pdl,
            query,
            query_rope,
            cache,
            rope_cache,
            _pointer(inputs.query_scales),
            _pointer(inputs.kv_scales),
            inputs.block_tables.data_ptr(),
            _pointer(inputs.table_starts),
            inputs.seq_lens.data_ptr(),
            0 if request.top_k else ends,
            ends,
            _pointer(inputs.top_k_lens),
            bmm1_tensor,
            bmm2_tensor,
            _pointer(inputs.sinks),
            out_pointer,
            _pointer(lse),
            scratch,
            scratch + plan.partial_rows_offset,
            counters_of(self.decode.device, workspace),
            self.layout,
            bmm1_scale,
            bmm2_scale,
            inputs.latent_scale,
            inputs.rope_scale,
            self.lse_factor,
        )
        return (made,)


def packed_call(
    inputs: MlaInputs, request: MlaRequest, index: int, spec: MlaHopperPackedSpec, plan: HopperPlan
) -> PackedCall:
    """Return how calls of the form of ``inputs`` are launched on GPU ``index``, by ``plan``."""
    workspace, name = inputs.workspace_buffer, inputs.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    return PackedCall(
        request=request,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        layout=_layout(inputs, request, spec, plan),
        lse_factor=LSE_FACTORS[inputs.return_lse_base],
    )


def _layout(
    inputs: MlaInputs, request: MlaRequest, spec: MlaHopperPackedSpec, plan: HopperPlan
) -> bytes:
    # Of a sparse call every query token is a request, whose table is its list.
    values = {
        **request.strides,
        "total_rows": request.tokens * request.heads,
        "requests": request.tokens if request.top_k else request.batch,
        "heads": request.heads,
        "q_len": 1 if request.top_k else request.q_len,
        "max_pages": request.top_k or request.max_pages,
        "num_pages": request.num_pages,
        "list_requests": request.batch,
        "list_q_len": request.q_len,
        "top_k": request.top_k,
        "teams": plan.teams,
        "team_size": plan.team_size,
        "is_causal": int(inputs.is_causal),
        "scores_take_bmm2": int(inputs.scores_take_bmm2),
        "plan": number_of_plan(inputs, request, spec),
    }
    return packed_integers(spec, values)


def _pointer(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0
