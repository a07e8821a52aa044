"""Generators of the documentation pages that repeat tables and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import mlagen
from mlagen import decode, jit, ops, prewarming, xqa
from mlagen.mla import flare, masks, trtllm, xqa_decode
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.doc_support import support_page
from tests.doc_text import markdown, paragraphs, sentences, table

API_SOURCES = """\
This page is generated from signatures and docstrings. The exceptions are on
[their own page](errors.md), and the supported dtypes, dimensions and page sizes in
[the support table](support.md)."""

MASKS = (
    masks.NullMask,
    masks.CausalMask,
    masks.SlidingWindowCausalMask,
    masks.SlidingWindowNonCausalMask,
    masks.ChunkedMask,
    masks.ChunkedCausalMask,
    masks.CausalPaddingMask,
    masks.MaterializedMask,
    masks.OrMask,
    masks.AndMask,
)


def api_page() -> str:
    """Return docs/reference/api.md."""
    return "\n".join(
        (
            "# Python API\n",
            *paragraphs(API_SOURCES),
            *_callable("mlagen.mla", trtllm.trtllm_batch_decode_with_kv_cache_mla),
            *_callable("mlagen.mla", xqa_decode.xqa_batch_decode_with_kv_cache_mla),
            *_callable("mlagen.mla", BatchMLAPagedAttentionWrapper, ("plan", "run")),
            *_callable("mlagen.mla", flare.flare_mla_decoding),
            *_callable("mlagen", flare.PagedKVCache),
            "## Masks of `mlagen.mla`\n",
            *paragraphs(inspect.getdoc(masks) or ""),
            *table([_mask_row(kind) for kind in MASKS]),
            *_callable("mlagen.xqa", xqa.xqa_mla),
            *_callable("mlagen.xqa", xqa.xqa),
            *_callable("mlagen.decode", decode.xqa_batch_decode_with_kv_cache),
            *_callable("mlagen.ops", ops.op),
            *_callable("mlagen", mlagen.workspace_bytes),
            *_callable("mlagen", jit.freeze),
            *_callable("mlagen", jit.on_compile),
            *_fields(jit.CompileEvent),
            *_callable("mlagen", mlagen.metrics),
            *_callable("mlagen", mlagen.prewarm),
            *_fields(prewarming.PrewarmReport),
            *_fields(prewarming.PrewarmUnit),
            *_fields(prewarming.PrewarmEvent),
        )
    )


GENERATED: dict[str, Callable[[], str]] = {
    "docs/reference/support.md": support_page,
    "docs/reference/api.md": api_page,
}


def _callable(
    module: str, documented: Callable[..., Any], methods: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield the section of a function, or of a class and some of its methods."""
    name = documented.__name__
    yield f"## `{module}.{name}`\n"
    yield from _signature(name, documented)
    yield from _docstring(documented)
    for method in methods:
        yield f"### `{name}.{method}`\n"
        function = getattr(documented, method)
        yield from _signature(method, function)
        yield from _docstring(function)


def _signature(name: str, documented: Callable[..., Any]) -> Iterator[str]:
    signature = inspect.signature(documented)
    yield "```python"
    yield f"{name}("
    star_is_due = True
    for parameter in signature.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and star_is_due:
            yield "    *,"
            star_is_due = False
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        has_default = parameter.default is not parameter.empty
        default = f" = {parameter.default!r}" if has_default else ""
        yield f"    {stars}{parameter.name}: {parameter.annotation}{default},"
    returned = signature.return_annotation
    yield ")" if inspect.isclass(documented) else f") -> {returned}"
    yield "```\n"


def _mask_row(kind: type) -> dict[str, str]:
    assert dataclasses.is_dataclass(kind)
    names = ", ".join(field.name for field in dataclasses.fields(kind))
    meaning = " ".join(sentences(markdown((inspect.getdoc(kind) or "").replace("\n\n", "\n"))))
    return {"mask": f"`{kind.__name__}({names})`", "rule": meaning}


def _fields(kind: type) -> Iterator[str]:
    """Yield the section of a returned dataclass: its fields as in the source, its methods."""
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
    """Yield a NumPy docstring as Markdown, one sentence per line."""
    docstring = inspect.getdoc(documented) or ""
    text, *sections = re.split(r"^(\w+)\n-{3,}\n", docstring, flags=re.MULTILINE)
    yield from paragraphs(text)
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        yield f"**{title}**\n"
        if title == "Notes":
            yield from paragraphs(body)
            continue
        for entry in re.split(r"\n(?=\S)", body.strip()):
            head, _, description = entry.partition("\n")
            yield f"- `{head}`:"
            yield from (f"  {sentence}" for sentence in sentences(markdown(description)))
        yield ""
