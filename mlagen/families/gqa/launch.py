"""Launchers of the grouped-query kernels: sm80, for every call on every GPU, and sm90."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlagen.errors import DriverError, UnsupportedError
from mlagen.families.common.arguments import ALIGNMENT_BYTES
from mlagen.families.common.launchers import (
    LAUNCH,
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
    plan_within,
)
from mlagen.families.common.problem import LaunchPlan
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.plan import (
    GqaSm90Plan,
    fits_in_int32,
    plan_gqa_sm90_call,
    shape_of,
)
from mlagen.families.gqa.problem import (
    GATE_ALIGNMENT_BYTES,
    MASK_ALIGNMENT_BYTES,
    GqaProblem,
    alignment_of,
    check_pointers,
    paged_caches,
)
from mlagen.families.gqa.sparse import MAX_TOKENS
from mlagen.families.gqa.tensor_maps import GqaCacheMaps, GqaTensorMapLayout, maps_of
from mlagen.runtime.device import arch_of_device
from mlagen.runtime.partition import WHOLE_GPU
from mlagen.settings import Settings
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from mlagen.spec.gqa.variant import (
    PROBLEM_PARAMETERS,
    GqaSpec,
    GqaVariant,
)

_COVERED = (
    "covered: sm_90a, block indices none, of pages or, unless batch-invariant, of tokens, cache as "
    "the query, e4m3, e5m2, int8 or NVFP4, keys and values of a multiple of 32 bytes and up to 256 "
    "elements, or both of 512 (NVFP4: both of 64, 128 or 256), and but for indices of tokens "
    "page_size a multiple of 16 and strides of the cache below 2^40 bytes"
)

_AXES = ("page", "token", "head")

_MAX_ROW_OFFSET = 1 << 30  # bytes; coordinates of TMA boxes are int32

_SOURCES = joined(
    {
        name: Address(name)
        for name in (
            *("query", "key_cache", "key_scales", "block_tables", "seq_lens", "sinks"),
            *("causal_seqlens_kv_global", "block_indices", "token_to_req", "output_gate"),
        )
    },
    {
        "kv_indptr": Address("kv_indptr"),
        "cu_seqlens_q": Address("cum_seq_lens_q"),
        "bmm1_scale_tensor": Address("bmm1_scale"),
        "bmm1_scale": Number("bmm1_scale"),
        "key_map": LAUNCH,
        "value_map": LAUNCH,
    },
)

_OF_PROBLEM = " ".join(
    parameter.name
    for parameter in PROBLEM_PARAMETERS
    if parameter.name not in {"num_seqs", "q_len", "block_tables_stride"}  # see launcher_of
)
_OF_VARIANT = "soft_cap cp_world cp_rank num_indices has_index_counts"
_SM90 = "m_tiles num_tiles num_cta_groups cta_group_size takes_whole_tiles"


@dataclass(kw_only=True, eq=False)
class GqaLauncher(Launcher):
    """Launcher of grouped-query calls."""

    maps: GqaCacheMaps | None = None  # None: a kernel without TMA
    cache_alignment: int

    def fixed_of(self, args: GqaArgs) -> tuple[Any, ...]:
        """Return what all calls of this launcher share, with where its rows and scales begin."""
        facts = super().fixed_of(args)
        if not self.problem.variant.has_token_scales:
            return facts
        key, value = _base_addresses(args, self.problem)
        is_aligned = (key | value) % ALIGNMENT_BYTES == 0
        return (*facts, is_aligned, _has_scales_in_rows(args, self.problem))

    def complete(self, args: GqaArgs, values: dict[str, Any]) -> None:
        """Reject misaligned tensors, and add the tensor maps."""
        key, value = values["key_cache"], values["value_cache"]
        if (
            (values["query"] | values["workspace"] | values["out"]) % ALIGNMENT_BYTES
            or (key | value) % self.cache_alignment
            or values["draft_mask"] % MASK_ALIGNMENT_BYTES
            or values["output_gate"] % GATE_ALIGNMENT_BYTES
        ):
            check_pointers(args, self.cache_alignment)
        if self.maps is not None:
            values["maps"] = self.maps(key, value)


def make_sm90_launcher(
    args: GqaArgs, problem: GqaProblem, settings: Settings, sms: int = WHOLE_GPU
) -> GqaLauncher:
    """Return the launcher of the sm90 kernel for calls like ``args`` on ``sms`` SMs.

    Raises UnsupportedError if the settings force the sm80 kernel, the sm90 kernel does not support
    the call, or the driver rejects the tensor map of the cache.
    """
    if settings.gqa_kernel == "sm80":
        raise NotCoveredError("MLAGEN_GQA_KERNEL=sm80")
    index, variant, shape = problem.device.index, problem.variant, shape_of(args, problem)
    max_tokens = _schedule_tokens(problem)
    is_unaligned = not _has_aligned_rows(args)
    if is_unaligned:
        _require_scales_in_rows(args, problem)
    facts = {"has_unaligned_rows": is_unaligned}

    def plan_on(sms: int) -> tuple[GqaSm90Spec, GqaSm90Plan] | None:
        planned = plan_gqa_sm90_call(index, variant, shape, sms=sms, **facts)
        if planned is None or variant.batch_invariant or fits_in_int32(*planned, max_tokens):
            return planned
        # KV tiles of one head have more tokens.
        return plan_gqa_sm90_call(index, variant, shape, has_one_head=True, sms=sms, **facts)

    sms = max(sms, WHOLE_GPU)  # it needs no cooperation
    planned = plan_within(args.workspace_buffer, sms, plan_on)
    if planned is None:
        raise not_covered(index, variant)
    spec, plan = planned
    if not fits_in_int32(spec, plan, max_tokens):
        raise UnsupportedError(
            f"MLAGEN_GQA_KERNEL=sm90: expected fewer than 2^31 KV blocks of {spec.block_n} "
            f"tokens in all work tiles, got {plan.total_tiles} of up to {max_tokens} tokens"
        )
    maps = _maps_of_cache(args, problem, spec)
    return launcher_of(args, problem, plan, spec, named(plan, _SM90), maps)


def _maps_of_cache(args: GqaArgs, problem: GqaProblem, spec: GqaSm90Spec) -> GqaCacheMaps | None:
    """Return the tensor maps of caches with these strides; those of ``args`` are encoded.

    Raises
    ------
    UnsupportedError
        If the driver rejects one.
    """
    if not spec.uses_tma:
        return None
    maps = maps_of(
        GqaTensorMapLayout(
            spec=spec,
            num_pages=problem.num_pages,
            kv_heads=problem.kv_heads,
            key_strides=_cache_strides(problem, "key"),
            value_strides=_cache_strides(problem, "value"),
        )
    )
    try:
        maps(*_base_addresses(args, problem))
    except DriverError as error:
        raise UnsupportedError(f"MLAGEN_GQA_KERNEL=sm90: {error}; {_COVERED}") from error
    return maps


def launcher_of(
    args: GqaArgs,
    problem: GqaProblem,
    plan: LaunchPlan,
    spec: GqaSpec,
    planned: Sources,
    maps: GqaCacheMaps | None = None,
) -> GqaLauncher:
    """Return the launcher of a kernel and its plan, which ``planned`` has by kernel parameter."""
    is_e4m3 = problem.variant.out_dtype is DType.E4M3
    value_tables: Source = 0
    if problem.variant.separate_page_ids:
        whole = "block_indices" if problem.variant.sparse_block else "block_tables"
        value_tables = Part(whole, problem.value_tables_offset)
    sources = joined(
        _SOURCES,
        problem.strides,
        planned,
        {
            "value_cache": Part("key_cache", problem.value_offset, "value_cache"),
            "value_scales": Part("key_scales", problem.value_scale_offset, "value_scales"),
            "value_tables": value_tables,
            "draft_mask": Address("mask") if problem.mask_words else 0,
            "bmm2_scale_tensor": Address("bmm2_scale") if problem.takes_bmm2 else 0,
            "bmm2_scale": Number("bmm2_scale") if problem.takes_bmm2 else 1.0,
            "output_factor": Number("out_e4m3_factor" if is_e4m3 else "out_16bit_factor"),
            "max_tokens": min(_schedule_tokens(problem), MAX_TOKENS),
        },
        {
            "num_seqs": problem.tokens if problem.variant.sparse_block else problem.batch,
            "q_len": 1 if problem.variant.sparse_block else problem.q_len,
            "num_requests": problem.batch,
            "request_q_len": problem.q_len,
            "tokens": problem.tokens,
        },
        named(problem, f"{_OF_PROBLEM} {_OF_VARIANT}"),
    )
    alignment = max(alignment_of(args, cache) for cache in paged_caches(args))
    if isinstance(spec, GqaSm90Spec) and not spec.has_unaligned_rows:
        alignment = ALIGNMENT_BYTES
    facts = {"maps": maps, "cache_alignment": alignment}
    return make_launcher(GqaLauncher, args, problem, plan, spec, sources, **facts)


def _schedule_tokens(problem: GqaProblem) -> int:
    """Return the most KV tokens of a sequence of the schedule."""
    sparse_tokens = problem.num_indices * problem.variant.sparse_block
    return sparse_tokens or problem.max_pages * problem.variant.page_size


def not_covered(index: int, variant: GqaVariant) -> NotCoveredError:
    """Return the error where the settings force the kernel and it does not support the call."""
    return NotCoveredError(
        f"MLAGEN_GQA_KERNEL=sm90: no such kernel for {arch_of_device(index)}, "
        f"query {variant.query_dtype}, cache {variant.kv_dtype}, head_dim {variant.head_dim}"
        f"{f' (values {variant.head_dim_vo})' if variant.head_dim_vo else ''}, "
        f"page_size {variant.page_size}; {_COVERED}"
    )


def _has_aligned_rows(args: GqaArgs) -> bool:
    """Return whether rows begin where TMA boxes may, as those with scales between them do not."""
    for cache in paged_caches(args):
        axes = zip(cache.shape[:-1], cache.stride(), strict=False)
        places = [stride * cache.element_size() for size, stride in axes if size > 1]
        if any(place % ALIGNMENT_BYTES for place in (cache.data_ptr(), *places)):
            return False
    return True


def _require_scales_in_rows(args: GqaArgs, problem: GqaProblem) -> None:
    """Reject unaligned rows but those of the sm90 kernel: with a scale behind each.

    Its TMA boxes begin at rows of every second token.
    """
    sizes = (problem.num_pages, problem.variant.page_size, problem.kv_heads)
    for part in ("key", "value"):
        page, token, head = strides = _cache_strides(problem, part)
        pairs = zip(strides, _cache_strides(problem, f"{part}_scale"), sizes, strict=True)
        is_covered = (
            all(stride == of_scales for stride, of_scales, size in pairs if size > 1)
            and 2 * token % ALIGNMENT_BYTES == 0
            and (page % ALIGNMENT_BYTES == 0 or problem.num_pages == 1)
            and token + head * problem.kv_heads < _MAX_ROW_OFFSET
        )
        if not (is_covered and _has_scales_in_rows(args, problem)):
            rule = f"rows at multiples of {ALIGNMENT_BYTES} bytes, or with their scales behind them"
            raise NotCoveredError(f"MLAGEN_GQA_KERNEL=sm90: expected {rule}; {_COVERED}")


def _has_scales_in_rows(args: GqaArgs, problem: GqaProblem) -> bool:
    """Return whether the first scales are behind the first key and value."""
    if args.key_scales is None:
        return False
    first = args.key_scales.data_ptr()
    second = first + problem.value_scale_offset
    if args.value_scales is not None:
        second = args.value_scales.data_ptr()
    key, value = _base_addresses(args, problem)
    variant = problem.variant
    dims = (variant.head_dim, variant.head_dim_vo or variant.head_dim)
    return (first - key, second - value) == tuple(map(variant.kv_dtype.row_bytes, dims))


def _base_addresses(args: GqaArgs, problem: GqaProblem) -> tuple[int, int]:
    """Return the base addresses of keys and values."""
    key = args.key_cache.data_ptr()
    if args.value_cache is None:
        return key, key + problem.value_offset
    return key, args.value_cache.data_ptr()


def _cache_strides(problem: GqaProblem, part: str) -> tuple[int, int, int]:
    """Return the bytes between pages, tokens and heads of keys or values."""
    page, token, head = (problem.strides[f"{part}_{axis}_stride"] for axis in _AXES)
    return page, token, head
