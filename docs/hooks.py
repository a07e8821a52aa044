"""Hooks of mkdocs: the site has the tree of the checkout, and loads nothing from another host.

Pages link to each other by their paths in the checkout, as a code-hosting site follows them. mkdocs
reads one folder alone, so this hook passes it the files of ``docs`` by those paths, and the pages
and files outside of it that pages link to. No link is rewritten.

Diagrams are drawn here, as the theme would load Mermaid from another host. A page or a style that
loads something from there gives a warning, which fails a strict build.
"""

from __future__ import annotations

import base64
import html
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mermaidx
from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "*.md",
    "CITATION.cff",
    "LICENSE",
    "docs/iframe-worker.js",
    "docs/site.css",
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/results/**/*.json",
    "examples/*.md",
    "examples/*.py",
    "templates/README.md",
    # The sources of the API page.
    "mlagen/cascade.py",
    "mlagen/distributed.py",
    "mlagen/families/workspace.py",
    "mlagen/gqa/msa.py",
    "mlagen/gqa/qsa.py",
    "mlagen/gqa/trtllm.py",
    "mlagen/gqa/wrapper.py",
    "mlagen/gqa/xqa.py",
    "mlagen/jit.py",
    "mlagen/mla/contract.py",
    "mlagen/mla/dsv4.py",
    "mlagen/mla/flare.py",
    "mlagen/mla/flare_operands.py",
    "mlagen/mla/masks.py",
    "mlagen/mla/trtllm.py",
    "mlagen/mla/wrapper.py",
    "mlagen/mla/xqa.py",
    "mlagen/monitoring.py",
    "mlagen/ops.py",
    "mlagen/prewarming/report.py",
    "mlagen/prewarming/run.py",
    "mlagen/writers.py",
)

# Flowcharts that are narrow enough to be read in a column, and a grid behind the bars.
_DIAGRAM = {
    "flowchart": {"nodeSpacing": 30, "padding": 10, "rankSpacing": 30, "wrappingWidth": 150}
}
_GRID = ".grid .tick line { stroke: lightgrey; }"
_CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
_HYPHENATED = re.compile(r"[\w./-]*-[\w./-]+")
_PARTS = re.compile(r"(?<=\w_)(?=\w)|(?<=[a-z])(?=[A-Z])(?![^<]*>)")
_MERMAID = re.compile(r'<pre class="mermaid"><code>(.*?)</code></pre>', re.DOTALL)
_URL = r"""\s*["']?\s*(?:https?:)?//[^"'\s)>]+"""
# Tags and rules that load what they name; a link that a reader follows is none.
_LOADS = re.compile(
    rf"<(?!a\b)[a-z]+\b[^>]*?\s(?:src|srcset|data|poster)={_URL}"
    rf"|<link\b(?![^>]*\brel=[\"']?(?:canonical|next|prev)\b)[^>]*?\shref={_URL}"
    rf"|<(?:image|use)\b[^>]*?href={_URL}|\burl\({_URL}|@import{_URL}",
    re.IGNORECASE,
)
_log = logging.getLogger("mkdocs.hooks")


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Return the HTML of a page with its diagrams drawn, and names broken in the contents alone."""
    _break_names(page.toc)
    return _CODE.sub(_with_whole_words, _MERMAID.sub(_drawn, content))


def _with_whole_words(code: re.Match[str]) -> str:
    return _HYPHENATED.sub(r'<span class="word">\g<0></span>', code[0])


def _break_names(items: Iterable[Any]) -> None:
    for item in items:
        item.title = _PARTS.sub("<wbr>", item.title)
        _break_names(item.children)


def _drawn(block: re.Match[str]) -> str:
    """Return the image of a Mermaid block."""
    svg = mermaidx.render(html.unescape(block[1]), config=_DIAGRAM, css=_GRID).svg()
    data = base64.b64encode(svg.encode()).decode()
    return f'<p><img class="diagram" alt="diagram" src="data:image/svg+xml;base64,{data}"></p>'


def on_post_page(output: str, *, page: Any, **_: Any) -> None:
    """Warn of what a page loads from another host."""
    _warn_of_loads(output, page.file.src_uri)


def on_post_build(*, config: MkDocsConfig) -> None:
    """Warn of what a style loads from another host."""
    for path in sorted(Path(config.site_dir).rglob("*.css")):
        _warn_of_loads(path.read_text(encoding="utf-8"), path.name)


def _warn_of_loads(text: str, name: str) -> None:
    for found in loads_in(text):
        _log.warning("%s loads from another host: %s", name, found)


def loads_in(text: str) -> list[str]:
    """Return what HTML or CSS loads from another host."""
    return [found[0] for found in _LOADS.finditer(text)]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Return the files of the site: those of the theme, and those of the checkout."""
    site = [file for file in files if file.abs_src_path is None or not _is_ours(file)]
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            site.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return Files(site)


def _is_ours(file: File) -> bool:
    return Path(file.abs_src_path or "/").is_relative_to(ROOT / "docs")


class Roles(Extension):
    """Makes ``:func:`name``` of a docstring a link to what it names, where that has a section.

    The decorated functions of entry points return the arguments of a family; what their callers get
    is in the docstring.
    """

    _ARGUMENTS = ("GqaArgs", "MlaArgs")

    _ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([\w.]+)`")
    _LINK = r'<autoref optional identifier="\1"><code>\1</code></autoref>'

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a function, class or module."""
        if obj.is_function and str(obj.returns) in self._ARGUMENTS:
            obj.returns = None
        if obj.docstring:
            obj.docstring.value = self._ROLE.sub(self._LINK, obj.docstring.value)
