"""The generated page on what is supported, from the tables that checks and prewarming read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from mlagen.api.mla_query import MAX_HEADS
from mlagen.compiler.toolchain import OLDEST_NVRTC
from mlagen.spec import (
    gqa,
    gqa_sm90,
    mla,
    mla_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
    mla_support,
)
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.gqa import GqaSm80Spec, GqaVariant, gqa_sm80_spec
from mlagen.spec.mla import MlaSm80Spec, mla_sm80_spec
from mlagen.spec.mla_support import MlaSupport, MlaVariant, output_dtype
from tests.doc_text import paragraphs, table

# Where the tests of tests/gpu have passed.
HAS_RUN_ON = {Arch(90, "a"): "H100, H200"}

FORMS = {
    "paged": mla_support.PLAIN,
    "sparse": mla_support.SPARSE,
    "separate": mla_support.SEPARATE,
    "bias": mla_support.BIAS,
}

# What each entry point can ask for; what it asks for decides a call, not a setting.
ENTRY_POINTS = [
    {
        "entry point": "`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "asks for": "paged, sparse and separate; every pair but `fp8_per_token`",
    },
    {
        "entry point": "`mlagen.mla.xqa_batch_decode_with_kv_cache_mla`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "asks for": "paged; every pair but `fp8_per_token`",
    },
    {
        "entry point": "`mlagen.mla.BatchMLAPagedAttentionWrapper`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8kv`",
        "asks for": "paged; `bf16` and `fp16` alike, and `e4m3` under `bf16` with a latent of 512",
    },
    {
        "entry point": "`mlagen.mla.flare_mla_decoding`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "asks for": "paged and bias; dims (512, 64)",
    },
    {
        "entry point": "`mlagen.xqa.xqa_mla`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "asks for": "paged and separate; dims (512, 64); every pair but the packed ones",
    },
    {
        "entry point": "`mlagen.decode.xqa_batch_decode_with_kv_cache`",
        "kernels": "`gqa_sm80`, `gqa_sm90`",
        "asks for": "all",
    },
    {
        "entry point": "`mlagen.xqa.xqa`",
        "kernels": "`gqa_sm80`, `gqa_sm90`",
        "asks for": "all",
    },
]

SOURCES = """\
This page is generated from the tables that the code itself reads: `SUPPORTED` and `TILES` in
`mlagen/spec/mla_support.py`, `mlagen/spec/mla.py` and `mlagen/spec/gqa.py`, `BLOCK_MS` in
`mlagen/spec/mla_sm90.py` and `mlagen/spec/gqa_sm90.py`, `ARCHS` in `mlagen/spec/arch.py`."""

ENTRY_READING = """\
Every entry point is served by the families of kernels that are named here, and by `combine`
where a kernel that is not made for Hopper splits sequences."""

MLA_READING = f"""\
Dims are pairs of `kv_lora_rank` and `qk_rope_head_dim`. With each row: 1 to {MAX_HEADS} heads, 1
or more query tokens, any batch size, any sequence length, any page size; prewarming compiles for
pages of {", ".join(map(str, mla_support.PAGE_SIZES))} tokens. On CPU tensors the same is supported.

The form says how tokens are found. *Paged*: a block table, all tokens or a causal prefix. *Sparse*:
a list of tokens for every query token. *Separate*: values from a block table or a buffer of their
own. *Bias*: a number is added to every score, which is how masks are written out."""

DTYPES_READING = """\
`fp8_ds_mla` is 656 bytes a token: 512 elements of e4m3, 4 fp32 scales for 128 of them each, 64
elements of bf16. `fp8_per_token` is 640 bytes: 512 elements of e4m3 and 64 of bf16, with one fp32
scale for each token in a tensor of its own. `nvfp4` is two elements of e2m1 in a byte, and an e4m3
scale for 16 elements in a tensor of its own."""

HOPPER_READING = f"""\
On `sm_90a` these calls take the kernel named, and all others `mla_sm80`, unless
[`MLAGEN_MLA_KERNEL`](environment.md#the-kernel-of-mla-calls) says otherwise. Pages are of a
multiple of 16 tokens, for `mla_sm90_fp8kv` of any number; of paged calls with query and cache in
`e4m3` it serves those of other pages, and those that ask for
[p_dtype_choice in fp16](environment.md#what-p_dtype_choice-are-rounded-to). Tiles have
{", ".join(map(str, sorted(mla_sm90.BLOCK_MS)))} rows: a request takes the narrowest that holds
its rows, or the widest, and one of fewer rows where there is too little to do for all SMs; of a
sparse call every query token is a request. A cache whose strides are 2^40 bytes or more takes
`mla_sm80`, too, unless `mla_sm90_fp8kv` is the kernel of such calls."""

GQA_READING = f"""\
With each row: head dims that are multiples of 16 up to {gqa.SLICE_DIMS}, and 512; any page size;
any number of query heads that is a multiple of the kv heads; 1 or more query tokens, with any draft
mask, window and sinks; any batch size, any sequence length. Prewarming compiles for head dims
{", ".join(map(str, gqa.HEAD_DIMS))} and pages of {", ".join(map(str, gqa.PAGE_SIZES))} tokens; the
others are compiled when a call asks for them. On CPU tensors the same is supported."""

GQA_HOPPER_READING = f"""\
On `sm_90a` calls take `gqa_sm90`, unless
[`MLAGEN_GQA_KERNEL`](environment.md#the-kernel-of-grouped-query-calls) says otherwise, where the
cache is as the query or e4m3, the head dim {", ".join(map(str, gqa.HEAD_DIMS[:-1]))} or
{gqa.HEAD_DIMS[-1]}, a page a multiple of 16 tokens, and no stride of the cache 2^40 bytes or more;
all others take `gqa_sm80`. Its tiles have {", ".join(map(str, sorted(gqa_sm90.BLOCK_MS)))}
rows, of head dim 256 at most 16: a request takes the narrowest that holds its rows of a kv head, or
the widest."""

ARCHS_READING = f"""\
The numbers are kernels that prewarming knows, each an entry of the cache once it is asked for.
NVRTC {".".join(map(str, OLDEST_NVRTC))} or newer compiles them, if it knows the architecture. An
empty last cell means that none has run there yet."""

TILES_READING = """\
Which tile is taken depends on the rows of a request, and on the shared memory that a block of the
architecture may have: the narrowest tile that holds the rows, or the widest that there is.
`2 per SM` means two blocks on a multiprocessor."""

MLA_TILES_READING = """\
A tile of 16 x 32 is 16 rows, heads times query tokens, by 32 tokens at a time; in the sparse form a
request is one query token."""

GQA_TILES_READING = """\
A tile of 16 x 4 x 6 is 16 rows, query heads of one kv head times query tokens, by 4 warps of 16
tokens each, which prefetch 6 groups of keys or values."""


def support_page() -> str:
    """Return docs/reference/support.md."""
    return "\n".join(
        (
            "# Support table\n",
            *paragraphs(SOURCES),
            "## Entry points\n",
            *paragraphs(ENTRY_READING),
            *table(ENTRY_POINTS),
            "## MLA decode\n",
            *table([_mla_row(row) for row in mla_support.SUPPORTED]),
            *paragraphs(MLA_READING),
            *paragraphs(DTYPES_READING),
            "## The sm90 kernels\n",
            *paragraphs(HOPPER_READING),
            *table(list(_hopper_rows())),
            "## GQA decode\n",
            *table([_gqa_row(row) for row in gqa.SUPPORTED]),
            *paragraphs(GQA_READING),
            *paragraphs(GQA_HOPPER_READING),
            "## Architectures\n",
            *paragraphs(ARCHS_READING),
            *table([_arch_row(arch) for arch in ARCHS]),
            "## Tiles\n",
            *paragraphs(TILES_READING),
            "### Of MLA decode\n",
            *paragraphs(MLA_TILES_READING),
            *table(list(_mla_tile_rows())),
            "### Of GQA decode\n",
            *paragraphs(GQA_TILES_READING),
            *table(list(_gqa_tile_rows())),
        )
    )


def _mla_row(row: MlaSupport) -> dict[str, Any]:
    return {
        "query": f"`{row.query_dtype}`",
        "cache": f"`{row.kv_dtype}`",
        "output": f"`{output_dtype(row.query_dtype)}`",
        "dims": ", ".join(f"({rank}, {rope})" for rank, rope in row.head_dims),
        **{name: "yes" if form in row.forms else "" for name, form in FORMS.items()},
    }


def _hopper_rows() -> Iterator[dict[str, str]]:
    """Yield what the sm90 kernels cover of the table of MLA decode."""
    arch = Arch(90, "a")
    specs: list[mla_sm90.MlaSm90Spec] = [
        *mla_sm90.mla_sm90_specs(arch),
        *mla_sm90_fp8.mla_sm90_fp8_specs(arch),
        *mla_sm90_fp8kv.mla_sm90_fp8kv_specs(arch),
    ]
    covered = dict.fromkeys((spec.family, replace(spec.variant, page_size=64)) for spec in specs)
    for family, variant in covered:
        form = (variant.lookup, variant.values, variant.mask)
        yield {
            "kernel": f"`{family}`",
            "query": f"`{variant.query_dtype}`",
            "cache": f"`{variant.kv_dtype}`",
            "dims": f"({variant.kv_lora_rank}, {variant.qk_rope_head_dim})",
            "form": next(name for name, known in FORMS.items() if known == form),
        }


def _gqa_row(row: gqa.GqaSupport) -> dict[str, Any]:
    return {
        "query": f"`{row.query_dtype}`",
        "cache": f"`{row.kv_dtype}`",
        "output": " or ".join(f"`{dtype}`" for dtype in row.out_dtypes),
    }


def _arch_row(arch: Arch) -> dict[str, Any]:
    return {
        "architecture": f"`{arch}`",
        "shared memory of a block": f"{arch.shared_bytes // 1024} KiB",
        "converts e4m3": "yes" if arch.has_cvt_e4m3 else "in software",
        "dependent launch": "yes" if arch.has_griddepcontrol else "no",
        **{f"`{family}`": len(specs_of(arch, [family])) for family in FAMILIES},
        "has run on": HAS_RUN_ON.get(arch, ""),
    }


def _mla_tile_rows() -> Iterator[dict[str, str]]:
    head_dims = dict.fromkeys(dims for row in mla_support.SUPPORTED for dims in row.head_dims)
    for dims in head_dims:
        for name, form in FORMS.items():
            rows = [r for r in mla_support.SUPPORTED if dims in r.head_dims and form in r.forms]
            for pairs, tiles in _alike(rows, partial(_mla_tiles, form=form, dims=dims)):
                yield {"dims": str(dims), "form": name, "query over cache": pairs, **tiles}


def _gqa_tile_rows() -> Iterator[dict[str, str]]:
    for head_dim in (*gqa.HEAD_DIMS, 512):
        for pairs, tiles in _alike(gqa.SUPPORTED, partial(_gqa_tiles, head_dim=head_dim)):
            yield {"head dim": str(head_dim), "query over cache": pairs, **tiles}


def _alike(
    rows: Iterable[Any], tiles_of: Callable[[Any], dict[str, str]]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the pairs of dtypes that take the same tiles, with those tiles."""
    pairs: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for row in rows:
        pair = f"`{row.query_dtype}` over `{row.kv_dtype}`"
        pairs.setdefault(tuple(tiles_of(row).items()), []).append(pair)
    for tiles, those in pairs.items():
        yield ", ".join(those), dict(tiles)


def _by_shared_memory(tiles_of: Callable[[Arch], str]) -> dict[str, str]:
    """Return the tiles for each size of shared memory, which is all of an architecture that counts.

    Architectures of one size have one column.
    """
    by_size = sorted(ARCHS, key=lambda arch: arch.shared_bytes)
    return {
        f"{size // 1024} KiB": tiles_of(next(archs))
        for size, archs in groupby(by_size, lambda arch: arch.shared_bytes)
    }


def _mla_tiles(
    row: MlaSupport, form: tuple[str, str, str], dims: tuple[int, int]
) -> dict[str, str]:
    lookup, values, mask = form
    variant = MlaVariant(
        query_dtype=row.query_dtype,
        kv_dtype=row.kv_dtype,
        kv_lora_rank=dims[0],
        qk_rope_head_dim=dims[1],
        lookup=lookup,
        values=values,
        mask=mask,
    )

    def text(spec: MlaSm80Spec) -> str:
        return f"{spec.tile.block_m} x {spec.tile.block_n}{_per_sm(spec.tile.ctas_per_sm)}"

    def tiles(arch: Arch) -> str:
        specs = [mla_sm80_spec(arch, variant, tile.block_m) for tile in reversed(mla.TILES)]
        return ", ".join(map(text, dict.fromkeys(specs)))

    return _by_shared_memory(tiles)


def _gqa_tiles(row: gqa.GqaSupport, head_dim: int) -> dict[str, str]:
    variant = GqaVariant(
        query_dtype=row.query_dtype,
        kv_dtype=row.kv_dtype,
        out_dtype=row.query_dtype,
        head_dim=head_dim,
    )

    def text(spec: GqaSm80Spec) -> str:
        rows, warps, items, ctas_per_sm = spec.tile
        return f"{rows} x {warps} x {items}{_per_sm(ctas_per_sm)}"

    def tiles(arch: Arch) -> str:
        specs = [gqa_sm80_spec(arch, variant, tile.block_m) for tile in reversed(gqa.TILES)]
        return ", ".join(map(text, dict.fromkeys(specs)))

    return _by_shared_memory(tiles)


def _per_sm(blocks: int) -> str:
    return f" ({blocks} per SM)" if blocks > 1 else ""
