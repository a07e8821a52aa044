"""Launchers of the MLA kernels: sm80, for every call on every GPU, and sm90."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlagen.errors import DriverError, UnsupportedError
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.common.launchers import (
    LAUNCH,
    LSE_FACTORS,
    Address,
    Launcher,
    NotCoveredError,
    Number,
    Part,
    Source,
    Sources,
    joined,
    make_launcher,
    named,
)
from mlagen.families.common.problem import LaunchPlan
from mlagen.families.mla.args import MlaArgs
from mlagen.families.mla.plan import (
    fits_in_int32,
    plan_for_workspace,
    plan_mla_sm90_call,
    schedule_id_of,
    shape_of,
)
from mlagen.families.mla.problem import MlaProblem, check_pointers
from mlagen.families.mla.tensor_maps import CacheMaps, TensorMapLayout, maps_of
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.partition import NO_COOPERATION, WHOLE_GPU
from mlagen.settings import Settings
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.spec.mla.variant import MlaKernelSpec, MlaVariant

_COVERED = (
    "covered: sm_90a, (kv_lora_rank, qk_rope_head_dim) (512, 64) or (512, 0), and of "
    "(lookup, values, mask) (paged, shared, causal) with query and cache both bf16, fp16 or e4m3, "
    "page_size a multiple of 16, strides of the cache below 2^40 bytes; (sparse, shared, causal) "
    "with query and cache both bf16 or fp16; (paged or sparse, shared, causal) with a cache of "
    "e4m3 or fp8_ds_mla under a query of bf16 or e4m3; (paged, shared, causal) with fp8_per_token; "
    "mask dcp as causal where paged"
)

_SOURCES = joined(
    {
        name: Address(name)
        for name in (
            *("query_scales", "value_cache", "kv_scales", "block_tables", "kv_indptr", "seq_lens"),
            *("bias", "sinks", "causal_seqlens_kv_global"),
        )
    },
    {
        "extra_cache": Address("extra_cache"),
        "extra_indices": Address("extra_indices"),
        "extra_topk_length": Address("extra_top_k_lens"),
        "query": Address("query"),
        "cache": Address("kv_cache"),
        "topk_length": Address("top_k_lens"),
        "sparse_cu_seqlens_q": Address("cum_seq_lens_q"),
        "bmm1_scale_tensor": Address("bmm1_scale"),
        "bmm2_scale_tensor": Address("bmm2_scale"),
        "output_factor": 1.0,
    },
    {name: Number(name) for name in ("bmm1_scale", "bmm2_scale", "latent_scale", "rope_scale")},
    dict.fromkeys(("latent_map", "rope_map", "kv_map"), LAUNCH),
)


@dataclass(kw_only=True, eq=False)
class MlaLauncher(Launcher):
    """Launcher of MLA calls."""

    maps: CacheMaps | None = None  # None: a kernel without TMA
    separate_constants: bytes = b""  # of a rope part with a map of its own

    def __post_init__(self) -> None:
        """Pack the constants of both kinds of rope parts."""
        if self.maps is not None:
            constants = {**self.constants, "separate_rope": 1}
            self.separate_constants = self.decode.packing.pack_constants(constants)

    def complete(self, args: MlaArgs, values: dict[str, Any]) -> None:
        """Reject misaligned tensors, and add the tensor maps."""
        cache, rope_cache = values["cache"], values["rope_cache"]
        pointers = values["query"] | values["query_rope"] | cache | rope_cache
        pointers |= values["value_cache"] | values["extra_cache"]
        pointers |= values["workspace"] | values["out"]
        if pointers % ALIGNMENT_BYTES:
            check_pointers(args)
        if self.maps is not None:
            values["maps"], has_separate_rope = self.maps(cache, rope_cache)
            if has_separate_rope:
                values[self.decode.spec.symbol] = self.separate_constants


def make_sm90_launcher(
    args: MlaArgs, problem: MlaProblem, settings: Settings, sms: int = WHOLE_GPU
) -> MlaLauncher:
    """Return the launcher of an sm90 kernel for calls like ``args`` on ``sms`` SMs.

    Raises UnsupportedError if the settings force the sm80 kernel, no sm90 kernel supports the call,
    or the driver rejects its grids or the tensor map of the cache. Unless the settings force an
    sm90 kernel, also if the call is so small that the sm80 kernel is faster, or the plan for a
    context of fewer SMs needs a larger workspace.
    """
    is_forced = settings.mla_kernel == "sm90"
    if settings.mla_kernel == "sm80":
        raise NotCoveredError("MLAGEN_MLA_KERNEL=sm80")
    if sms == NO_COOPERATION:
        raise UnsupportedError(
            "MLAGEN_MLA_KERNEL=sm90: expected a context whose SMs hold all CTAs at once, got one "
            "in which the driver rejects them; unset it to take the sm80 kernel"
        )
    index, variant, shape = problem.device.index, problem.variant, shape_of(args, problem)
    planned = plan_mla_sm90_call(
        index, variant, shape, p_dtype_choice=settings.mla_p_dtype, sms=sms
    )
    if planned is None:
        raise not_covered(index, variant)
    spec, plan = planned
    max_tokens = problem.max_pages * variant.page_size
    if problem.top_k:
        max_tokens = problem.top_k + problem.extra_top_k
    if not fits_in_int32(spec, plan, max_tokens):
        raise UnsupportedError(
            f"MLAGEN_MLA_KERNEL=sm90: expected fewer than 2^31 KV blocks of 64 tokens in all "
            f"work tiles, got {plan.total_tiles} work tiles of up to {max_tokens} tokens"
        )
    if plan.is_small and not is_forced:
        raise UnsupportedError("the call is so small that the sm80 kernel is faster")
    plan = plan_for_workspace(spec, plan, args.workspace_buffer.nbytes)
    maps = _maps_of_cache(args, problem, spec)
    workspace, name = args.workspace_buffer, args.names.workspace_buffer
    # A workspace sized for the whole GPU must suffice, and the grid for it would not fit.
    keeps_sm90 = is_forced or variant.batch_invariant
    if sms != WHOLE_GPU and plan.workspace_bytes > workspace.nbytes and not keeps_sm90:
        raise UnsupportedError(f"{name}: too small for the plan for {sms} SMs")
    facts = named(plan, "num_cta_groups cta_group_size max_splits num_slots")
    facts |= {**spec.split_facts, "schedule_id": schedule_id_of(args, problem, spec)}
    return launcher_of(args, problem, plan, spec, facts, maps)


def launcher_of(
    args: MlaArgs,
    problem: MlaProblem,
    plan: LaunchPlan,
    spec: MlaKernelSpec,
    planned: Sources,
    maps: CacheMaps | None = None,
) -> MlaLauncher:
    """Return the launcher of a kernel and its plan, which ``planned`` has by kernel parameter."""
    # To an sm90 kernel every query token of a sparse call is a sequence, with its top-k indices as
    # its table.
    is_per_token = isinstance(spec, MlaSm90Spec) and problem.top_k > 0
    value_tables: Source = 0
    if args.value_cache is not None:
        value_tables = Part("block_tables", problem.value_tables_offset)
    sources = joined(
        _SOURCES,
        problem.strides,
        problem.pool_parameters,
        planned,
        {
            "query_rope": Part("query", problem.query_rope_offset, "query_rope"),
            "rope_cache": Part("cache", problem.rope_cache_offset, "rope_cache"),
            "value_tables": value_tables,
            "cu_seqlens_q": 0 if is_per_token else Address("cum_seq_lens_q"),
            "num_seqs": problem.tokens if is_per_token else problem.batch,
            "q_len": 1 if is_per_token else problem.q_len,
            "max_pages": problem.top_k if is_per_token else problem.max_pages,
            "num_pages": problem.num_pages,
            "sparse_num_seqs": problem.batch,
            "sparse_q_len": problem.q_len,
            "topk": problem.top_k,
            "separate_rope": 0,
            "lse_factor": LSE_FACTORS[args.return_lse_base],
        },
        named(args, "is_causal cp_world cp_rank bmm2_scales_scores"),
    )
    return make_launcher(MlaLauncher, args, problem, plan, spec, sources, maps=maps)


def not_covered(index: int, variant: MlaVariant) -> NotCoveredError:
    """Return the error where the settings force the kernel and it does not support the call."""
    dims = f"({variant.kv_lora_rank}, {variant.qk_rope_head_dim})"
    mode = f"({variant.lookup}, {variant.values}, {variant.mask})"
    return NotCoveredError(
        f"MLAGEN_MLA_KERNEL=sm90: no such kernel for {arch_of_device(index)}, "
        f"query {variant.query_dtype}, cache {variant.kv_dtype}, "
        f"(kv_lora_rank, qk_rope_head_dim) {dims}, (lookup, values, mask) {mode}, "
        f"page_size {variant.page_size}; {_COVERED}"
    )


def _maps_of_cache(args: MlaArgs, problem: MlaProblem, spec: MlaSm90Spec) -> CacheMaps | None:
    """Return the tensor maps of caches with these strides; that of ``args`` is encoded.

    Raises UnsupportedError if the driver rejects it.
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
    cache, rope = args.kv_cache.data_ptr(), args.rope_cache
    try:
        maps(cache, cache + problem.rope_cache_offset if rope is None else rope.data_ptr())
    except DriverError as error:
        raise UnsupportedError(f"MLAGEN_MLA_KERNEL=sm90: {error}; {_COVERED}") from error
    return maps
