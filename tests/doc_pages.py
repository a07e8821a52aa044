"""The generated pages of the documentation, from the tables and docstrings that they repeat."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import mlagen
from mlagen import mla, prewarming
from mlagen.api.mla_request import MOST_HEADS
from mlagen.compiler.toolchain import OLDEST_NVRTC
from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.mla import SUPPORTED, TILES, mla_decode_spec
from tests.doc_text import sentences

# Where the tests of tests/gpu have passed.
HAS_RUN_ON = {Arch(90, "a"): "H200"}

# What the pages say around their tables; wrapped here, one sentence to a line there.
SUPPORT_SOURCES = """\
This page is generated from the tables that the code itself reads: `SUPPORTED` and `TILES` in
`mlagen/spec/mla.py`, `ARCHS` in `mlagen/spec/arch.py`."""

SUPPORTED_SIZES = f"""\
With each row: 1 to {MOST_HEADS} heads, 1 or more query tokens, any batch size, any sequence length.
On CPU tensors the same is supported."""

ARCHS_READING = f"""\
The numbers are kernels, each an entry of the cache once it is asked for. NVRTC
{".".join(map(str, OLDEST_NVRTC))} or newer compiles them, if it knows the architecture. The tests
compile them all; an empty last cell means that none has run there yet."""

TILES_READING = """\
A kernel takes the rows of a request, heads times query tokens, in tiles. A request gets the
narrowest tile that holds its rows, or the widest that fits the shared memory of the architecture.
A tile of 16 x 32 is 16 rows by 32 tokens at a time; `2 per SM` means two blocks on a
multiprocessor."""

API_SOURCES = """\
This page is generated from signatures and docstrings. The exceptions are on
[a page of their own](errors.md), and the dtypes, dimensions and page sizes that a call may have in
[the support table](support.md)."""


def support_page() -> str:
    """Return docs/reference/support.md."""
    rows = [
        {
            "query": f"`{row.query_dtype}`",
            "cache": f"`{row.kv_dtype}`",
            "`kv_lora_rank`": row.kv_lora_rank,
            "`qk_rope_head_dim`": row.qk_rope_head_dim,
            "`page_size`": ", ".join(map(str, row.page_sizes)),
        }
        for row in SUPPORTED
    ]
    archs = [
        {
            "architecture": f"`{arch}`",
            "shared memory of a block": f"{arch.shared_bytes // 1024} KiB",
            "dependent launch": "yes" if arch.has_griddepcontrol else "no",
            **{f"`{family}`": len(specs_of(arch, [family])) for family in FAMILIES},
            "has run on": HAS_RUN_ON.get(arch, ""),
        }
        for arch in ARCHS
    ]
    return "\n".join(
        (
            "# Support table\n",
            *_paragraphs(SUPPORT_SOURCES),
            "## MLA decode\n",
            *_table(rows),
            *_paragraphs(SUPPORTED_SIZES),
            "## Architectures\n",
            *_paragraphs(ARCHS_READING),
            *_table(archs),
            "## Tiles\n",
            *_paragraphs(TILES_READING),
            *_table(list(_tile_rows())),
        )
    )


def api_page() -> str:
    """Return docs/reference/api.md."""
    door = mla.trtllm_batch_decode_with_kv_cache_mla
    return "\n".join(
        (
            "# Python API\n",
            *_paragraphs(API_SOURCES),
            *_function(f"mlagen.mla.{door.__name__}", door),
            *_function("mlagen.workspace_bytes", mlagen.workspace_bytes),
            *_function("mlagen.prewarm", mlagen.prewarm),
            *_class(prewarming.PrewarmReport),
            *_class(prewarming.PrewarmUnit),
            *_class(prewarming.PrewarmEvent),
        )
    )


GENERATED: dict[str, Callable[[], str]] = {
    "docs/reference/support.md": support_page,
    "docs/reference/api.md": api_page,
}


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(rows[0])} |"
    yield f"|{'---|' * len(rows[0])}"
    for row in rows:
        yield f"| {' | '.join(map(str, row.values()))} |"
    yield ""


def _tile_rows() -> Iterator[dict[str, str]]:
    ranks = list(dict.fromkeys(row.kv_lora_rank for row in SUPPORTED))
    archs_of: dict[tuple[str, ...], list[Arch]] = {}
    for arch in ARCHS:
        archs_of.setdefault(tuple(_tiles_of(arch, rank) for rank in ranks), []).append(arch)
    for tiles, archs in archs_of.items():
        columns = {f"`kv_lora_rank` {rank}": text for rank, text in zip(ranks, tiles, strict=True)}
        yield {"architectures": ", ".join(f"`{arch}`" for arch in archs), **columns}


def _tiles_of(arch: Arch, kv_lora_rank: int) -> str:
    specs = [
        mla_decode_spec(
            arch=arch,
            query_dtype=DType.BF16,
            kv_dtype=DType.BF16,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=64,
            page_size=64,
            rows=tile.tile_rows,
        )
        for tile in reversed(TILES)
    ]
    return ", ".join(
        f"{spec.tile_rows} x {spec.tile_tokens}"
        + (f" ({spec.blocks_per_sm} per SM)" if spec.blocks_per_sm > 1 else "")
        for spec in dict.fromkeys(specs)
    )


def _function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield "```python"
    yield f"{function.__name__}("
    star_is_due = True
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and star_is_due:
            yield "    *,"
            star_is_due = False
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        has_default = parameter.default is not parameter.empty
        default = f" = {parameter.default!r}" if has_default else ""
        yield f"    {stars}{parameter.name}: {parameter.annotation}{default},"
    yield f") -> {inspect.signature(function).return_annotation}"
    yield "```\n"
    yield from _docstring(function)


def _class(kind: type) -> Iterator[str]:
    assert dataclasses.is_dataclass(kind)
    source = inspect.getsource(kind).partition("\n    def ")[0]
    fields = re.search(r'"""\n\n(?P<fields>.*)', source, re.DOTALL)
    assert fields is not None, kind
    yield f"## `{kind.__module__}.{kind.__name__}`\n"
    yield from _docstring(kind)
    yield "```python"
    yield inspect.cleandoc(fields["fields"])
    yield "```\n"
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if not name.startswith("_"):
            yield f"### `{kind.__name__}.{name}()`\n"
            yield from _docstring(method)


def _docstring(documented: object) -> Iterator[str]:
    """Yield a docstring in NumPy's form as Markdown, one sentence to a line."""
    docstring = inspect.getdoc(documented) or ""
    text, *sections = re.split(r"^(\w+)\n-{3,}\n", docstring, flags=re.MULTILINE)
    yield from _paragraphs(text)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        yield f"**{title}**\n"
        if title == "Notes":
            yield from _paragraphs(body)
            continue
        for entry in re.split(r"\n(?=\S)", body.strip()):
            head, _, description = entry.partition("\n")
            yield f"- `{head}`:"
            yield from (f"  {sentence}" for sentence in sentences(_markdown(description)))
        yield ""


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield from sentences(_markdown(paragraph))
        yield ""


def _markdown(text: str) -> str:
    """Return reStructuredText of docstrings as Markdown: literals, and roles as literals."""
    return re.sub(r"(?::\w+:)?(`{1,2})(.+?)\1", r"`\2`", text)
