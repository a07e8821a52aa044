"""The support page has the tables that checks and prewarming read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from mlagen.compiler.toolchain import OLDEST_NVRTC
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.gqa import sm90 as gqa_sm90
from mlagen.spec.gqa import variant as gqa
from mlagen.spec.gqa.sm80 import TILES, GqaSm80Spec, gqa_sm80_spec
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.mla import sm80 as mla
from mlagen.spec.mla import sm90 as mla_sm90
from mlagen.spec.mla import sm90_fp8 as mla_sm90_fp8
from mlagen.spec.mla import sm90_fp8kv as mla_sm90_fp8kv
from mlagen.spec.mla import variant as mla_support
from mlagen.spec.mla.sm80 import MlaSm80Spec, mla_sm80_spec
from mlagen.spec.mla.variant import MAX_HEADS, MlaSupport, MlaVariant, output_dtype
from tests.doc_text import PAGES, table

# GPUs where tests/gpu has passed.
HAS_RUN_ON = {Arch(90, "a"): "H100, H200"}

MODES = {
    "paged": mla_support.PLAIN,
    "sparse": mla_support.SPARSE,
    "separate": mla_support.SEPARATE,
    "bias": mla_support.BIAS,
    "dcp": mla_support.DCP,
}


def test_the_support_page_has_the_tables_of_the_code() -> None:
    """Its tables and numbers are those that the code reads; MLAGEN_ACCEPT=1 renews the tables."""
    page = PAGES["docs/reference/support.md"]
    expected = support_page(page.read_text(encoding="utf-8"))
    if os.environ.get("MLAGEN_ACCEPT"):
        page.write_text(expected, encoding="utf-8")
    written = page.read_text(encoding="utf-8")
    renew = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_support.py"
    assert written == expected, renew
    assert [fact for fact in facts() if fact not in written] == []


def facts() -> tuple[str, ...]:
    """Return the numbers of the tables that the prose of the page has."""
    return (
        f"1 to {MAX_HEADS} heads",
        f"compiles page sizes {_listed(mla_support.PAGE_SIZES)}.",
        f"`BLOCK_M` is {_listed(sorted(mla_sm90.BLOCK_MS))}: a request",
        f"multiples of 16 up to {gqa.SLICE_DIMS}, and 512;",
        f"compiles head dims {_listed(gqa.HEAD_DIMS)} and page sizes {_listed(gqa.PAGE_SIZES)};",
        f"the head dim is {_listed(gqa.HEAD_DIMS[:-1])} or {gqa.HEAD_DIMS[-1]},",
        f"`BLOCK_M` is {_listed(sorted(gqa_sm90.BLOCK_MS))}, for head dim",
        f"NVRTC {'.'.join(map(str, OLDEST_NVRTC))} or newer",
    )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def support_page(page: str) -> str:
    """Return docs/reference/support.md with the tables of the code; entry points have no table."""
    made = (
        [_mla_row(row) for row in mla_support.SUPPORTED],
        list(_sm90_rows()),
        [_gqa_row(row) for row in gqa.SUPPORTED],
        [_arch_row(arch) for arch in ARCHS],
        list(_mla_tile_rows()),
        list(_gqa_tile_rows()),
    )
    first, *_ = written = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    texts = [first, *("\n".join(table(rows)) for rows in made)]
    for old, new in zip(written, texts, strict=True):
        page = page.replace(old, new, 1)
    return page


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
    modes: dict[tuple[str, ...], list[str]] = {}
    for family, variant in covered:
        mode = (variant.lookup, variant.values, variant.mask)
        dims = f"({variant.kv_lora_rank}, {variant.qk_rope_head_dim})"
        key = (family, str(variant.query_dtype), str(variant.kv_dtype), dims)
        modes.setdefault(key, []).append(
            next(name for name, known in MODES.items() if known == mode)
        )
    rows: dict[tuple[str, ...], list[str]] = {}
    for (*names, dims), those in modes.items():
        rows.setdefault((*names, ", ".join(those)), []).append(dims)
    for (family, query, cache, those_modes), those_dims in rows.items():
        yield {
            "kernel": f"`{family}`",
            "query": f"`{query}`",
            "cache": f"`{cache}`",
            "dims": ", ".join(those_dims),
            "mode": those_modes,
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
        specs = [gqa_sm80_spec(arch, variant, tile.block_m) for tile in reversed(TILES)]
        return ", ".join(map(text, dict.fromkeys(specs)))

    return _by_shared_memory(tiles)


def _per_sm(ctas: int) -> str:
    return f" ({ctas} per SM)" if ctas > 1 else ""
