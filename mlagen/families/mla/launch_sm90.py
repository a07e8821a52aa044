"""Launchers of the sm90 MLA kernels: one persistent kernel for any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from mlagen.engine import kernel_for
from mlagen.errors import DriverError, UnsupportedError
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.common.choice_log import decline, log_declined
from mlagen.families.common.launchers import scale_of, scratch_offset
from mlagen.families.common.outputs import LSE_FACTORS
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.plan_sm90 import MlaSm90Plan, fits_in_int32
from mlagen.families.mla.problem import MlaProblem, check_pointers
from mlagen.families.mla.select import plan_mla_sm90_call, schedule_id_of, shape_of
from mlagen.families.mla.tensor_maps import CacheMaps, TensorMapLayout, maps_of
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.launch import Launch, launch
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.runtime.semaphores import semaphores_of
from mlagen.settings import Settings
from mlagen.spec.kernel import KernelSpec, pack_constants
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.spec.mla.sm90_fp8kv import MlaSm90Fp8KvSpec
from mlagen.spec.mla.variant import MlaVariant

MlaSm90AnySpec = MlaSm90Spec | MlaSm90Fp8KvSpec
Values = Callable[[dict[str, Any]], tuple[Any, ...]]

_COVERED = (
    "covered: sm_90a, (kv_lora_rank, qk_rope_head_dim) (512, 64) or (512, 0), and of "
    "(lookup, values, mask) (paged, shared, causal) with query and cache both bf16, fp16 or e4m3, "
    "page_size a multiple of 16, strides of the cache below 2^40 bytes; (sparse, shared, causal) "
    "with query and cache both bf16 or fp16; (paged or sparse, shared, causal) with a cache of "
    "e4m3 or fp8_ds_mla under a query of bf16 or e4m3; (paged, shared, causal) with fp8_per_token; "
    "mask dcp as causal where paged"
)


@dataclass(frozen=True, kw_only=True)
class MlaSm90Launcher:
    """A validated call signature with a loaded kernel and a launch plan."""

    problem: MlaProblem
    plan: MlaSm90Plan
    scratch_offset: int  # bytes in the workspace
    decode: LoadedKernel
    maps: CacheMaps | None  # None: a kernel without TMA
    packed_constants: tuple[bytes, bytes]  # the constant kernel parameters, by separate_rope
    pointers_of: Values  # in the order of the kernel
    floats_of: Values
    lse_factor: float

    def launch(
        self, args: MlaArgs, enable_pdl: bool, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernel of one call with this signature."""
        problem, plan = self.problem, self.plan
        query = args.query.data_ptr()
        cache = args.kv_cache.data_ptr()
        workspace = args.workspace_buffer.data_ptr()
        scratch = workspace + self.scratch_offset
        out_pointer = out.data_ptr()
        query_rope = _pointer(args.query_rope) or query + problem.query_rope_offset
        rope_cache = _pointer(args.rope_cache) or cache + problem.rope_cache_offset
        all_pointers = query | query_rope | cache | rope_cache | workspace | out_pointer
        if all_pointers % ALIGNMENT_BYTES:
            check_pointers(args)
        cu_seqlens_q = _pointer(args.cum_seq_lens_q)
        bmm1_tensor, bmm1_scale = scale_of(args.bmm1_scale)
        bmm2_tensor, bmm2_scale = scale_of(args.bmm2_scale)
        values = {
            "query": query,
            "query_rope": query_rope,
            "cache": cache,
            "rope_cache": rope_cache,
            "query_scales": _pointer(args.query_scales),
            "kv_scales": _pointer(args.kv_scales),
            "block_tables": args.block_tables.data_ptr(),
            "kv_indptr": _pointer(args.kv_indptr),
            "seq_lens": args.seq_lens.data_ptr(),
            # In a sparse call every query token is a sequence.
            "cu_seqlens_q": 0 if problem.top_k else cu_seqlens_q,
            "sparse_cu_seqlens_q": cu_seqlens_q,
            "topk_length": _pointer(args.top_k_lens),
            "bmm1_scale_tensor": bmm1_tensor,
            "bmm2_scale_tensor": bmm2_tensor,
            "sinks": _pointer(args.sinks),
            "out": out_pointer,
            "lse": _pointer(lse),
            "partial_out": scratch,
            "partial_states": scratch + plan.partial_rows_offset,
            "semaphores": semaphores_of(self.decode.device, workspace),
            "causal_seqlens_kv_global": _pointer(args.causal_seqlens_kv_global),
            "bmm1_scale": bmm1_scale,
            "bmm2_scale": bmm2_scale,
            "latent_scale": args.latent_scale,
            "rope_scale": args.rope_scale,
            "lse_factor": self.lse_factor,
        }
        maps: tuple[bytes, ...] = ()
        separate_rope = 0
        if self.maps is not None:
            joined, separate_rope = self.maps[cache, rope_cache]
            maps = (joined,)
        decode_launch = launch(
            self.decode,
            plan.num_ctas,
            enable_pdl,
            *maps,
            *self.pointers_of(values),
            self.packed_constants[separate_rope],
            *self.floats_of(values),
        )
        return (decode_launch,)


def make_sm90_launcher(
    args: MlaArgs,
    problem: MlaProblem,
    index: int,
    settings: Settings,
    sms: int = WHOLE_GPU,
) -> MlaSm90Launcher | None:
    """Return the launcher for the signature of ``args`` on ``sms`` SMs of GPU ``index``.

    None if no sm90 kernel supports it, the call is so small that the sm80 kernel is faster, or the
    driver rejects the tensor map of the cache.

    Raises
    ------
    UnsupportedError
        Instead of returning None, if the settings force the kernel.
    """
    is_forced = settings.mla_kernel == "sm90"
    shape = shape_of(args, problem)
    planned = plan_mla_sm90_call(
        index, problem.variant, shape, p_dtype_choice=settings.mla_p_dtype, sms=sms
    )
    if planned is None:
        decline(lambda: not_covered(index, problem.variant), is_forced=is_forced)
        return None
    spec, plan = planned
    max_tokens = problem.top_k or problem.max_pages * problem.variant.page_size
    if not fits_in_int32(spec, plan, max_tokens):
        too_long = UnsupportedError(
            f"MLAGEN_MLA_KERNEL=sm90: expected fewer than 2^31 KV blocks of 64 tokens in all "
            f"work tiles, got {plan.total_tiles} work tiles of up to {max_tokens} tokens"
        )
        decline(lambda: too_long, is_forced=is_forced)
        return None
    if plan.is_small and not is_forced:
        log_declined("the call is so small that this kernel is faster")
        return None
    try:
        maps = _maps_of_cache(args, problem, spec)
    except DriverError as error:
        no_map = UnsupportedError(f"MLAGEN_MLA_KERNEL=sm90: {error}; {_COVERED}")
        decline(lambda: no_map, is_forced=is_forced)
        return None
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    offset = scratch_offset(workspace, name, plan.workspace_bytes)
    return MlaSm90Launcher(
        problem=problem,
        plan=plan,
        scratch_offset=offset,
        decode=kernel_for(spec, index),
        maps=maps,
        packed_constants=_packed_constants(args, problem, spec, plan),
        pointers_of=_values_of(spec, "Q"),
        floats_of=_values_of(spec, "f"),
        lse_factor=LSE_FACTORS[args.return_lse_base],
    )


def not_covered(index: int, variant: MlaVariant) -> UnsupportedError:
    """Return the error where the settings force the kernel and it does not support the call."""
    dims = f"({variant.kv_lora_rank}, {variant.qk_rope_head_dim})"
    mode = f"({variant.lookup}, {variant.values}, {variant.mask})"
    return UnsupportedError(
        f"MLAGEN_MLA_KERNEL=sm90: no such kernel for {arch_of_device(index)}, "
        f"query {variant.query_dtype}, cache {variant.kv_dtype}, "
        f"(kv_lora_rank, qk_rope_head_dim) {dims}, (lookup, values, mask) {mode}, "
        f"page_size {variant.page_size}; {_COVERED}"
    )


def _maps_of_cache(args: MlaArgs, problem: MlaProblem, spec: MlaSm90AnySpec) -> CacheMaps | None:
    """Return the tensor maps of caches with the signature; that of ``args`` is encoded.

    Raises
    ------
    DriverError
        If the driver rejects it.
    """
    if not spec.uses_tma:
        return None
    strides = problem.strides
    maps = maps_of(
        TensorMapLayout(
            spec=spec,
            num_pages=problem.num_pages,
            page_stride=strides["page_stride"],
            token_stride=strides["token_stride"],
            rope_page_stride=strides["rope_page_stride"],
            rope_token_stride=strides["rope_token_stride"],
        )
    )
    cache = args.kv_cache.data_ptr()
    _ = maps[cache, _pointer(args.rope_cache) or cache + problem.rope_cache_offset]
    return maps


def _packed_constants(
    args: MlaArgs, problem: MlaProblem, spec: MlaSm90AnySpec, plan: MlaSm90Plan
) -> tuple[bytes, bytes]:
    # In a sparse call every query token is a sequence, and its table is its top-k indices.
    values = {
        **problem.strides,
        "total_rows": problem.tokens * problem.heads,
        "num_seqs": problem.tokens if problem.top_k else problem.batch,
        "heads": problem.heads,
        "q_len": 1 if problem.top_k else problem.q_len,
        "max_pages": problem.top_k or problem.max_pages,
        "num_pages": problem.num_pages,
        "sparse_num_seqs": problem.batch,
        "sparse_q_len": problem.q_len,
        "topk": problem.top_k,
        "num_cta_groups": plan.num_cta_groups,
        "cta_group_size": plan.cta_group_size,
        "is_causal": int(args.is_causal),
        "cp_world": args.cp_world,
        "cp_rank": args.cp_rank,
        "bmm2_scales_scores": int(args.bmm2_scales_scores),
        "schedule_id": schedule_id_of(args, problem, spec),
    }
    return (
        pack_constants(spec, {**values, "separate_rope": 0}),
        pack_constants(spec, {**values, "separate_rope": 1}),
    )


def _values_of(spec: KernelSpec, code: str) -> Values:
    return itemgetter(*(field.name for field in spec.parameters if field.code == code))


def _pointer(tensor: torch.Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0
