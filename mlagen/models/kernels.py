"""Kernels of a model on one GPU of a tensor-parallel group, by the rules of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.models.config import GqaModel, MlaModel
from mlagen.models.layers import GqaHeads
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import gqa_call_specs, mla_call_specs
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.variant import MAX_HEADS, SUPPORTED, MlaVariant
from mlagen.spec.write_rows import write_rows_specs_of
from mlagen.values import reject

# Pages of a server's KV block. The sm90 kernels need a multiple of 16 tokens, and FlashMLA and
# FlashInfer's decode kernels have no larger pages than 64.
PAGE_SIZES = (16, 32, 64)
# Heads on a GPU from which on vLLM's plugin converts fp8_ds_mla rows to bf16 for a long sparse
# prefill, which pays on an H200: docs/explanation/performance.md.
CONVERSION_MIN_HEADS = 64


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """How a model is served: each combination of the values; None selects the defaults."""

    tp: Sequence[int] = (1,)  # GPUs that share the heads
    dcp: Sequence[int] = (1,)  # those of them that share the KV cache, and gather the query heads
    q_lens: Sequence[int] = (1,)
    page_sizes: Sequence[int] | None = None
    dtypes: Sequence[DType] | None = None  # of the queries
    kv_dtypes: Sequence[DType] | None = None
    lookups: Sequence[str] | None = None


def page_size_of(block_size: int) -> int:
    """Return the tokens of a page where a server's KV block has ``block_size``.

    Blocks of a hybrid model are inflated to the size of a recurrent state, and split into pages.
    """
    return gcd(block_size, max(PAGE_SIZES))


def mla_calls(
    variant: MlaVariant, heads: int, q_lens: Iterable[int], dcp_size: int = 1
) -> Iterator[tuple[MlaVariant, int]]:
    """Yield the calls of MLA layers on a rank of decode context parallel, with their query rows."""
    if variant.lookup != "paged":  # every query token has its own top-k indices: a sequence
        yield variant, heads
        return
    # One query token attends to all tokens of its rank; several need the causal mask of all ranks.
    masks = ("causal", "dcp") if dcp_size > 1 else ("causal",)
    for mask, q_len in product(masks, q_lens):
        yield replace(variant, mask=mask), heads * q_len


def served_page_sizes(*, is_mla: bool, is_hybrid: bool) -> tuple[int, ...]:
    """Return the page sizes that servers of a model use by default.

    ``is_hybrid`` is whether some of its layers have a recurrent state.
    """
    if is_mla:
        return (64,)  # FlashMLA's; blocks of hybrid models are multiples of 128
    # Servers usually default to 16, and 64 is the largest that all decode kernels of FlashInfer
    # support; blocks of hybrid models are any multiple of 16.
    return PAGE_SIZES if is_hybrid else (16, 64)


def model_specs(
    arch: Arch,
    model: MlaModel | GqaModel,
    use: ServingOptions,
    on_left_out: Callable[[str], None] = lambda _: None,
) -> list[KernelSpec]:
    """Return the kernels that calls of ``model`` may take on ``arch``, without duplicates.

    Those that write a cache with a row format are among them.

    ``on_left_out`` receives a sentence for each kind of layer and each pair of dtypes without a
    kernel, if others have one. Raises ArgumentError if the heads are not divisible by ``tp``, or no
    kernel supports these options.
    """
    left_out = list(model.left_out)
    calls: Iterable[tuple[MlaVariant | GqaVariant, int]] = (
        _mla_calls(model, use) if isinstance(model, MlaModel) else _gqa_calls(model, use)
    )
    specs: dict[KernelSpec, None] = {}
    writers: dict[KernelSpec, None] = {}
    for variant, rows in calls:
        made = call_specs(arch, variant, rows)
        if isinstance(made, UnsupportedError):
            left_out.append(f"{model.name}: {made}")
        else:
            specs |= dict.fromkeys(made)
            if isinstance(variant, MlaVariant):  # tokens are quantized into rows
                facts = arch, model.dtype, variant.kv_dtype, sum(variant.head_dims)
                writers |= dict.fromkeys(write_rows_specs_of(*facts))
    if not specs:
        raise ArgumentError(left_out[len(model.left_out)])
    for sentence in dict.fromkeys(left_out):
        on_left_out(sentence)
    return [*specs, *writers]


def page_sizes_of(model: MlaModel | GqaModel, use: ServingOptions) -> Sequence[int]:
    """Return the page sizes of the calls: those of the servers by default.

    They are no constants of kernels over two pools: ``(0,)``. A page of Qwen3.8 is a whole KV
    block, which grows to the size of a recurrent state: without an option there are none.
    """
    if model.has_two_pools:
        if use.page_sizes:
            rule = "none, as its kernels take any"
            reject(f"{model.name}: page_size", rule, ", ".join(map(str, use.page_sizes)))
        return (0,)
    if model.sparse_block == 1:
        return use.page_sizes or ()
    sizes = served_page_sizes(is_mla=isinstance(model, MlaModel), is_hybrid=model.is_hybrid)
    if model.sparse_block:  # of MiniMax-M3
        sizes += (model.sparse_block,)  # vLLM's layers share the pages of those of blocks
    return use.page_sizes or sizes


def page_size_text(model: MlaModel | GqaModel, use: ServingOptions) -> str:
    """Return the page sizes of the calls in words."""
    sizes = page_sizes_of(model, use)
    has_any = model.has_two_pools or not sizes
    return "any page size" if has_any else f"page size {_joined(sizes)}"


def attention_text(model: MlaModel | GqaModel) -> str:
    """Return heads, dims and window of the layers of ``model`` on one line."""
    if isinstance(model, MlaModel):
        dims = f"{model.kv_lora_rank}+{model.qk_rope_head_dim}"
        pools = " over two pools" if model.has_two_pools else ""
        return f"MLA, {model.heads} heads of {dims}{', sparse' if model.is_sparse else ''}{pools}"
    layers = (
        f"{layer.heads}/{layer.kv_heads} heads of {layer.dims}" for layer in model.heads_of_layers()
    )
    window = f", window {model.window}" if model.window else ""
    cap = ", soft cap" if model.has_soft_cap else ""
    block = model.sparse_block
    blocks = f", blocks of {block}" if block > 1 else ", sparse" if block else ""
    return f"GQA, {' and '.join(layers)}{window}{cap}{blocks}"


def serving_text(model: MlaModel | GqaModel, use: ServingOptions) -> str:
    """Return how ``model`` is served, defaults included, on one line."""
    heads = [count for count, _ in _call_heads(model, use)]
    pairs, lookups, prefill = list(_dtypes(model, use)), [], []
    if isinstance(model, MlaModel):
        called = {(variant.query_dtype, variant.kv_dtype) for variant, _ in _mla_calls(model, use)}
        prefill = [f"{query}/{kv} for sparse prefill" for query, kv in called - set(pairs)]
        lookups = [lookup for pair in pairs for lookup in _lookups(model, *pair, use)]
    parts = [
        f"{_joined(heads)} heads",
        page_size_text(model, use),
        f"q_len {_joined(use.q_lens)}",
        f"query/cache {_joined(f'{query}/{kv}' for query, kv in pairs)}",
        *([_joined(lookups)] if lookups else []),
        *prefill,
    ]
    ranks = f", dcp {_joined(use.dcp)}" if max(use.dcp) > 1 else ""
    return f"{model.name}, tp {_joined(use.tp)}{ranks}: {', '.join(parts)}"


def _joined(values: Iterable[object]) -> str:
    return " and ".join(dict.fromkeys(map(str, values)))


def call_specs(
    arch: Arch, variant: MlaVariant | GqaVariant, rows: int
) -> list[KernelSpec] | UnsupportedError:
    """Return the kernels of such calls, or the error if there are none."""
    try:
        if isinstance(variant, MlaVariant):
            return mla_call_specs(arch, variant, rows)
        return gqa_call_specs(arch, variant, rows)
    except UnsupportedError as error:
        return error


def _mla_calls(model: MlaModel, use: ServingOptions) -> Iterator[tuple[MlaVariant, int]]:
    """Yield the variant of each call, with the query rows per sequence."""
    heads = list(_call_heads(model, use))
    if (most := max(heads)[0]) > MAX_HEADS:
        reject(f"{model.name}: heads per GPU", f"{MAX_HEADS} or less for MLA kernels", most)
    for query, kv in _dtypes(model, use):
        for lookup, page_size in product(
            _lookups(model, query, kv, use), page_sizes_of(model, use)
        ):
            variant = MlaVariant(
                query_dtype=query,
                kv_dtype=kv,
                kv_lora_rank=model.kv_lora_rank,
                qk_rope_head_dim=model.qk_rope_head_dim,
                page_size=page_size,
                lookup=lookup,
            )
            is_fp8 = lookup == "sparse" and kv is DType.FP8_DS_MLA
            for count, dcp in heads:
                yield from mla_calls(variant, count, use.q_lens, dcp)
                if is_fp8 and count >= CONVERSION_MIN_HEADS and dcp == 1:  # a long prefill in vLLM
                    bf16 = replace(variant, kv_dtype=DType.BF16, page_size=max(PAGE_SIZES))
                    yield bf16, count


def _gqa_calls(model: GqaModel, use: ServingOptions) -> Iterator[tuple[GqaVariant, int]]:
    """Yield the variant of each call, with the query rows per sequence and kv head."""
    if max(use.dcp) > 1:
        reject(f"{model.name}: dcp", "1 for GQA kernels", max(use.dcp))
    layers = [
        (heads, [_group_size(model, heads, tp) for tp in use.tp])
        for heads in model.heads_of_layers()
    ]
    page_sizes, block = page_sizes_of(model, use), model.sparse_block
    if not page_sizes:
        rule = "the tokens of a KV block, which a server logs, as a page is a block"
        reject(f"{model.name}: page_size", rule, "none")
    for (query, kv), (heads, groups) in product(_dtypes(model, use), layers):
        for page_size in page_sizes:
            variant = GqaVariant(
                query_dtype=query,
                kv_dtype=kv,
                out_dtype=query,
                head_dim=heads.head_dim,
                head_dim_vo=heads.head_dim_vo,
                page_size=page_size,
                has_soft_cap=model.has_soft_cap,
            )
            if block == 1:  # SGLang, to which each slot is a page, multiplies by the gate itself
                variant = replace(variant, sparse_block=1, has_output_gate=page_size > 1)
            # Every query token of a sparse call is a sequence.
            for group, q_len in product(groups, (1,) if block == 1 else use.q_lens):
                yield variant, group * q_len
        if block > 1:  # beside layers without blocks; a block is a page
            sparse = replace(variant, page_size=block, sparse_block=block)
            yield from ((sparse, group) for group in groups)


def _call_heads(model: MlaModel | GqaModel, use: ServingOptions) -> Iterator[tuple[int, int]]:
    """Yield the heads of a call, and the size of decode context parallel."""
    for tp, dcp in product(use.tp, use.dcp):
        if tp % dcp:
            raise ArgumentError(f"{model.name}: dcp: expected a divisor of tp {tp}, got {dcp}")
        yield _per_gpu(model, "num_attention_heads", model.heads, tp) * dcp, dcp


def _per_gpu(model: MlaModel | GqaModel, label: str, count: int, tp: int) -> int:
    """Return the share of one GPU in ``count``."""
    if count % tp:
        raise ArgumentError(f"{model.name}: tp: expected a divisor of {label} {count}, got {tp}")
    return count // tp


def _group_size(model: GqaModel, layer: GqaHeads, tp: int) -> int:
    """Return the GQA group size on one GPU."""
    heads = _per_gpu(model, "num_attention_heads", layer.heads, tp)
    # With more GPUs than kv heads, the kv heads are replicated.
    kv_heads = (
        1
        if tp % layer.kv_heads == 0
        else _per_gpu(model, "num_key_value_heads", layer.kv_heads, tp)
    )
    return heads // kv_heads


def _dtypes(model: MlaModel | GqaModel, use: ServingOptions) -> Iterator[tuple[DType, DType]]:
    """Yield the dtypes of query and cache of each call."""
    if model.has_two_pools:
        kv_dtypes = use.kv_dtypes or (DType.FP8_DSV4,)
        yield from product(use.dtypes or (model.dtype,), kv_dtypes)
        return
    if use.dtypes is not None or isinstance(model, GqaModel):
        for query in use.dtypes or (model.dtype,):
            yield from ((query, kv) for kv in use.kv_dtypes or (query,))
        return
    for kv in use.kv_dtypes or (model.dtype,):
        holds_queries = kv.row is not None and kv.row.holds_queries
        if not holds_queries:
            yield model.dtype, kv
        if holds_queries or kv is DType.E4M3:  # some servers quantize the query of e4m3
            yield kv, kv


def _lookups(model: MlaModel, query: DType, kv: DType, use: ServingOptions) -> Sequence[str]:
    if use.lookups is not None:
        return use.lookups
    if model.has_two_pools:
        return ("two_pools",)
    known = {
        lookup
        for row in SUPPORTED
        if (row.query_dtype, row.kv_dtype) == (query, kv)
        for lookup, values, mask in row.modes
        if (values, mask) == ("shared", "causal")
    }
    return ("paged", "sparse") if model.is_sparse and "sparse" in known else ("paged",)
