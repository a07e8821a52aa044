"""Generator of the support page, from the tables that checks and prewarming read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.gqa import sm80 as gqa
from mlagen.spec.gqa.sm80 import GqaSm80Spec, GqaVariant, gqa_sm80_spec
from mlagen.spec.mla import sm80 as mla
from mlagen.spec.mla import sm90 as mla_sm90
from mlagen.spec.mla import sm90_fp8 as mla_sm90_fp8
from mlagen.spec.mla import sm90_fp8kv as mla_sm90_fp8kv
from mlagen.spec.mla import variant as mla_support
from mlagen.spec.mla.sm80 import MlaSm80Spec, mla_sm80_spec
from mlagen.spec.mla.variant import MlaSupport, MlaVariant, output_dtype
from tests.doc_support_text import (
    ARCHS_READING,
    DTYPES_READING,
    ENTRY_POINTS,
    ENTRY_READING,
    GQA_READING,
    GQA_SM90_READING,
    GQA_TILES_READING,
    MLA_READING,
    MLA_TILES_READING,
    SM90_READING,
    SOURCES,
    TILES_READING,
)
from tests.doc_text import paragraphs, table

# GPUs where tests/gpu has passed.
HAS_RUN_ON = {Arch(90, "a"): "H100, H200"}

MODES = {
    "paged": mla_support.PLAIN,
    "sparse": mla_support.SPARSE,
    "separate": mla_support.SEPARATE,
    "bias": mla_support.BIAS,
    "dcp": mla_support.DCP,
}


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
            *paragraphs(SM90_READING),
            *table(list(_sm90_rows())),
            "## GQA decode\n",
            *table([_gqa_row(row) for row in gqa.SUPPORTED]),
            *paragraphs(GQA_READING),
            *paragraphs(GQA_SM90_READING),
            "## Architectures\n",
            *paragraphs(ARCHS_READING),
            *table([_arch_row(arch) for arch in ARCHS]),
            "## Tiles\n",
            *paragraphs(TILES_READING),
            "### MLA decode tiles\n",
            *paragraphs(MLA_TILES_READING),
            *table(list(_mla_tile_rows())),
            "### GQA decode tiles\n",
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
        **{name: "yes" if mode in row.modes else "" for name, mode in MODES.items()},
    }


def _sm90_rows() -> Iterator[dict[str, str]]:
    """Yield the rows of the MLA support table that the sm90 kernels cover."""
    arch = Arch(90, "a")
    specs: list[mla_sm90.MlaSm90Spec] = [
        *mla_sm90.mla_sm90_specs(arch),
        *mla_sm90_fp8.mla_sm90_fp8_specs(arch),
        *mla_sm90_fp8kv.mla_sm90_fp8kv_specs(arch),
    ]
    covered = dict.fromkeys((spec.family, replace(spec.variant, page_size=64)) for spec in specs)
    for family, variant in covered:
        mode = (variant.lookup, variant.values, variant.mask)
        yield {
            "kernel": f"`{family}`",
            "query": f"`{variant.query_dtype}`",
            "cache": f"`{variant.kv_dtype}`",
            "dims": f"({variant.kv_lora_rank}, {variant.qk_rope_head_dim})",
            "mode": next(name for name, known in MODES.items() if known == mode),
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
        "shared memory of a CTA": f"{arch.shared_bytes // 1024} KiB",
        "converts e4m3": "yes" if arch.has_cvt_e4m3 else "in software",
        "PDL": "yes" if arch.has_griddepcontrol else "no",
        **{f"`{family}`": len(specs_of(arch, [family])) for family in FAMILIES},
        "has run on": HAS_RUN_ON.get(arch, ""),
    }


def _mla_tile_rows() -> Iterator[dict[str, str]]:
    head_dims = dict.fromkeys(dims for row in mla_support.SUPPORTED for dims in row.head_dims)
    for dims in head_dims:
        for name, mode in MODES.items():
            rows = [r for r in mla_support.SUPPORTED if dims in r.head_dims and mode in r.modes]
            for pairs, tiles in _by_tiles(rows, partial(_mla_tiles, mode=mode, dims=dims)):
                yield {"dims": str(dims), "mode": name, "query over cache": pairs, **tiles}


def _gqa_tile_rows() -> Iterator[dict[str, str]]:
    for head_dim in (*gqa.HEAD_DIMS, 512):
        for pairs, tiles in _by_tiles(gqa.SUPPORTED, partial(_gqa_tiles, head_dim=head_dim)):
            yield {"head dim": str(head_dim), "query over cache": pairs, **tiles}


def _by_tiles(
    rows: Iterable[Any], tiles_of: Callable[[Any], dict[str, str]]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the pairs of dtypes with equal tiles, with those tiles."""
    pairs: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for row in rows:
        pair = f"`{row.query_dtype}` over `{row.kv_dtype}`"
        pairs.setdefault(tuple(tiles_of(row).items()), []).append(pair)
    for tiles, those in pairs.items():
        yield ", ".join(those), dict(tiles)


def _by_shared_memory(tiles_of: Callable[[Arch], str]) -> dict[str, str]:
    """Return the tiles for each size of shared memory, the only relevant property of an arch.

    Architectures of one size have one column.
    """
    by_size = sorted(ARCHS, key=lambda arch: arch.shared_bytes)
    return {
        f"{size // 1024} KiB": tiles_of(next(archs))
        for size, archs in groupby(by_size, lambda arch: arch.shared_bytes)
    }


def _mla_tiles(
    row: MlaSupport, mode: tuple[str, str, str], dims: tuple[int, int]
) -> dict[str, str]:
    lookup, values, mask = mode
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
        rows, warps, stages, ctas_per_sm = spec.tile
        return f"{rows} x {warps} x {stages}{_per_sm(ctas_per_sm)}"

    def tiles(arch: Arch) -> str:
        specs = [gqa_sm80_spec(arch, variant, tile.block_m) for tile in reversed(gqa.TILES)]
        return ", ".join(map(text, dict.fromkeys(specs)))

    return _by_shared_memory(tiles)


def _per_sm(ctas: int) -> str:
    return f" ({ctas} per SM)" if ctas > 1 else ""
