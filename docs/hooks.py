"""Hooks of mkdocs: the site has the tree of the checkout, and roles of docstrings are links.

Pages link to each other by their paths in the checkout, as a code-hosting site follows them. mkdocs
reads one folder alone, so this hook passes it the files of ``docs`` by those paths, and the pages
and files outside of it that pages link to. No link is rewritten.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (
    "*.md",
    "CITATION.cff",
    "LICENSE",
    "docs/site.css",
    "docs/**/*.md",
    "docs/**/*.svg",
    "docs/results/*.json",
    "examples/*.md",
    "examples/*.py",
    "templates/README.md",
    # The sources of the API page.
    "mlagen/cascade.py",
    "mlagen/distributed.py",
    "mlagen/families/workspace.py",
    "mlagen/decode.py",
    "mlagen/gqa/aliases.py",
    "mlagen/gqa/graph_decode.py",
    "mlagen/gqa/trtllm.py",
    "mlagen/gqa/wrapper.py",
    "mlagen/jit.py",
    "mlagen/mla/batch_contract.py",
    "mlagen/mla/flare.py",
    "mlagen/mla/flare_kv.py",
    "mlagen/mla/masks.py",
    "mlagen/mla/trtllm.py",
    "mlagen/mla/wrapper.py",
    "mlagen/mla/xqa_decode.py",
    "mlagen/mla/xqa_mla.py",
    "mlagen/monitoring.py",
    "mlagen/ops.py",
    "mlagen/prewarming/report.py",
    "mlagen/prewarming/run.py",
    "mlagen/xqa.py",
)


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
    """Makes ``:func:`name``` of a docstring a link to what it names, where that has a section."""

    _ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`([\w.]+)`")
    _LINK = r'<autoref optional identifier="\1"><code>\1</code></autoref>'

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Rewrite the docstring of a function, class or module."""
        if obj.docstring:
            obj.docstring.value = self._ROLE.sub(self._LINK, obj.docstring.value)
