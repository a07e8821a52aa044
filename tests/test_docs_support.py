"""The support page has the tables that checks and prewarming read."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mlagen.compiler.toolchain import OLDEST_NVRTC
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.gqa import sm90 as gqa_sm90
from mlagen.spec.gqa import variant as gqa
from mlagen.spec.mla import sm90 as mla_sm90
from mlagen.spec.mla import variant as mla_support
from mlagen.spec.mla.variant import MAX_HEADS, MlaSupport, output_dtype
from tests.doc_text import PAGES, table

# GPUs where tests/gpu has passed.
HAS_RUN_ON = {Arch(90, "a"): "H100, H200"}

MODES = {
    "paged": mla_support.PLAIN,
    "sparse": mla_support.SPARSE,
    "two pools": mla_support.TWO_POOLS,
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
        f"`BLOCK_M` is {_listed(sorted(gqa_sm90.BLOCK_MS))}, for more than",
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
    specs: list[Any] = specs_of(arch, [family.family for family in mla_sm90.MLA_SM90])
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
