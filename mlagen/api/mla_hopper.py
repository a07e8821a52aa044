"""MLA decode calls of the Hopper kernel: one launch, whatever the lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlagen.api.arguments import ALIGNMENT_BYTES
from mlagen.api.calls import scale_of, scratch_offset
from mlagen.api.choice_log import decline, log_declined
from mlagen.api.mla_hopper_packed import PackedCall, packed_call
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_maps import CacheForm, CacheMaps, maps_of
from mlagen.api.mla_plan import number_of_plan, plan_hopper_call
from mlagen.api.mla_request import LSE_FACTORS, MlaRequest, check_pointers
from mlagen.engine import kernel_for
from mlagen.errors import DriverError, UnsupportedError
from mlagen.runtime.counters import counters_of
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.plan_hopper import HopperPlan, line_fits
from mlagen.settings import Settings
from mlagen.spec.kernel import packed_integers
from mlagen.spec.mla_hopper import MlaHopperSpec
from mlagen.spec.mla_hopper_packed import MlaHopperPackedSpec
from mlagen.spec.mla_support import MlaVariant

_COVERED = (
    "covered: sm_90a, (kv_lora_rank, qk_rope_head_dim) (512, 64), and of (lookup, values, mask) "
    "(paged, shared, causal) with query and cache bf16, fp16 or e4m3 alike, page_size a multiple "
    "of 16, strides of the cache below 2^40 bytes; (paged, shared, causal) with query and cache "
    "e4m3, another page_size, or packed640; (sparse, shared, causal) with query and cache e4m3; "
    "either of both with a cache of e4m3 or packed656 under a query of bf16"
)


@dataclass(frozen=True, kw_only=True)
class HopperCall:
    """A form of arguments that is sound, with its kernel loaded and its launch planned."""

    request: MlaRequest
    plan: HopperPlan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    maps: CacheMaps
    layouts: tuple[bytes, bytes]  # the integers of the parameters, by whether rope is apart
    is_plain: bool  # query and cache are each one tensor, the tables another
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
        query_rope = query + request.query_rope_offset
        rope_cache = cache + request.rope_cache_offset
        table_starts = 0
        if not self.is_plain:
            if inputs.query_rope is not None:
                query_rope = inputs.query_rope.data_ptr()
            if inputs.rope_cache is not None:
                rope_cache = inputs.rope_cache.data_ptr()
            if inputs.table_starts is not None:
                table_starts = inputs.table_starts.data_ptr()
        beginnings = query | query_rope | cache | rope_cache | workspace | out_pointer
        if beginnings % ALIGNMENT_BYTES:
            check_pointers(inputs)
        maps, rope_is_apart = self.maps[cache, rope_cache]
        bmm1_tensor, bmm1_scale = scale_of(inputs.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(inputs.bmm2_scale)
        made = launch(
            self.decode,
            plan.blocks,
            enable_pdl,
            maps,
            query,
            query_rope,
            cache,
            inputs.block_tables.data_ptr(),
            table_starts,
            inputs.seq_lens.data_ptr(),
            inputs.cum_seq_lens_q.data_ptr() if inputs.cum_seq_lens_q is not None else 0,
            bmm1_tensor,
            bmm2_tensor,
            inputs.sinks.data_ptr() if inputs.sinks is not None else 0,
            out_pointer,
            lse.data_ptr() if lse is not None else 0,
            scratch,
            scratch + plan.partial_rows_offset,
            counters_of(self.decode.device, workspace),
            self.layouts[rope_is_apart],
            bmm1_scale,
            bmm2_scale,
            self.lse_factor,
        )
        return (made,)


def prepare_hopper(
    inputs: MlaInputs,
    request: MlaRequest,
    index: int,
    settings: Settings,
    sms: int = WHOLE_GPU,
) -> HopperCall | PackedCall | None:
    """Return how calls of the form of ``inputs`` are launched on ``sms`` SMs of GPU ``index``.

    None if no kernel covers them, they are too small for it to be the faster one, or the driver
    makes no map of such a cache.

    Raises
    ------
    UnsupportedError
        Instead of returning None, if the kernel is asked for by name.
    """
    is_forced = settings.mla_kernel == "hopper"
    planned = plan_hopper_call(
        device=index,
        variant=request.variant,
        batch=request.batch,
        q_len=request.q_len,
        tile_q_len=request.tile_q_len,
        tokens=request.tokens,
        heads=request.heads,
        longest_kv=request.top_k or int(inputs.max_seq_len),
        probabilities=settings.mla_probabilities,
        sms=sms,
    )
    if planned is None:
        decline(lambda: not_covered(index, request.variant), is_forced=is_forced)
        return None
    spec, plan = planned
    most_tokens = request.top_k or request.max_pages * request.variant.page_size
    if not line_fits(spec, plan, most_tokens):
        too_long = UnsupportedError(
            f"MLAGEN_MLA_KERNEL=hopper: expected fewer than 2^31 blocks of 64 tokens in all "
            f"requests and groups of rows, got {plan.groups} groups of up to {most_tokens} tokens"
        )
        decline(lambda: too_long, is_forced=is_forced)
        return None
    if plan.is_small and not is_forced:
        log_declined("the call is so small that this kernel is faster")
        return None
    if isinstance(spec, MlaHopperPackedSpec):
        return packed_call(inputs, request, index, spec, plan)
    maps = _maps_of_cache(request, spec)
    try:
        _ = maps[_beginnings(inputs, request)]
    except DriverError as error:
        no_map = UnsupportedError(f"MLAGEN_MLA_KERNEL=hopper: {error}; {_COVERED}")
        decline(lambda: no_map, is_forced=is_forced)
        return None
    workspace, name = inputs.workspace_buffer, inputs.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    apart = (inputs.query_rope, inputs.rope_cache, inputs.table_starts)
    number = number_of_plan(inputs, request, spec)
    return HopperCall(
        request=request,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        maps=maps,
        layouts=(
            _layout(inputs, request, spec, plan, number=number, rope_is_apart=0),
            _layout(inputs, request, spec, plan, number=number, rope_is_apart=1),
        ),
        is_plain=all(part is None for part in apart),
        lse_factor=LSE_FACTORS[inputs.return_lse_base],
    )


def not_covered(index: int, variant: MlaVariant) -> UnsupportedError:
    """Return what is raised where the kernel is asked for by name and covers no such call."""
    dims = f"({variant.kv_lora_rank}, {variant.qk_rope_head_dim})"
    form = f"({variant.lookup}, {variant.values}, {variant.mask})"
    return UnsupportedError(
        f"MLAGEN_MLA_KERNEL=hopper: no such kernel for {arch_of_device(index)}, "
        f"query {variant.query_dtype}, cache {variant.kv_dtype}, "
        f"(kv_lora_rank, qk_rope_head_dim) {dims}, (lookup, values, mask) {form}, "
        f"page_size {variant.page_size}; {_COVERED}"
    )


def _maps_of_cache(request: MlaRequest, spec: MlaHopperSpec) -> CacheMaps:
    strides = request.strides
    return maps_of(
        CacheForm(
            spec=spec,
            num_pages=request.num_pages,
            page_stride=strides["page_stride"],
            token_stride=strides["token_stride"],
            rope_page_stride=strides["rope_page_stride"],
            rope_token_stride=strides["rope_token_stride"],
        )
    )


def _beginnings(inputs: MlaInputs, request: MlaRequest) -> tuple[int, int]:
    """Return where the latent and the rope part of the cache begin."""
    cache = inputs.kv_cache.data_ptr()
    if inputs.rope_cache is None:
        return cache, cache + request.rope_cache_offset
    return cache, inputs.rope_cache.data_ptr()


def _layout(
    inputs: MlaInputs,
    request: MlaRequest,
    spec: MlaHopperSpec,
    plan: HopperPlan,
    *,
    number: int,
    rope_is_apart: int,
) -> bytes:
    values = {
        **request.strides,
        "total_rows": request.tokens * request.heads,
        "requests": request.batch,
        "heads": request.heads,
        "q_len": request.q_len,
        "max_pages": request.max_pages,
        "num_pages": request.num_pages,
        "teams": plan.teams,
        "team_size": plan.team_size,
        "rope_is_apart": rope_is_apart,
        "is_causal": int(inputs.is_causal),
        "scores_take_bmm2": int(inputs.scores_take_bmm2),
        "plan": number,
    }
    return packed_integers(spec, values)
