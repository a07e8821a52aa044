"""What a kernel is rendered from: the files of its template, and the facts of its spec.

A template sees the facts alone, so that both together are all that its text depends on. Imports no
Jinja: a warm process needs them for a key and never renders.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mlagen.codegen.includes import transitive_includes
from mlagen.errors import ToolchainError
from mlagen.paths import is_folder
from mlagen.spec.kernel import KernelSpec

# Increases when other text is rendered from the same templates and facts; a test demands it.
CODEGEN = "1"

_PACKAGE = Path(__file__).resolve().parent.parent
_FACT = re.compile(r"\bspec((?:\.\w+)+)")

Fact: TypeAlias = bool | int | str | tuple[bool | int | str, ...]


class TemplateInputs(NamedTuple):
    """What the kernels of one folder are rendered from."""

    digest: str  # SHA-256 of every file that such a kernel may include
    facts: tuple[str, ...]  # dotted names of what these files read of a spec


@cache
def template_root() -> Path:
    """Return the folder of the templates: inside the installed package, or beside it.

    Raises ToolchainError if neither is a folder, as in an installation that is imported from a zip
    archive.
    """
    inside = _PACKAGE / "templates"
    for folder in (inside, _PACKAGE.parent / "templates"):
        if is_folder(folder):
            return folder
    raise ToolchainError(
        f"templates: expected a folder, got none: {inside}; install mlagen unpacked, by pip: "
        "it cannot be imported from an archive"
    )


@cache
def template_inputs(folder: str) -> TemplateInputs:
    """Return what the kernels with a ``folder`` are rendered from.

    An edit of a file that only other kernels include does not change them. Raises CompileError if
    an ``#include`` cannot be resolved.
    """
    root = template_root()
    digest = hashlib.sha256(folder.encode())
    facts: set[str] = set()
    for name in sorted(transitive_includes(root, folder)):
        content = (root / name).read_bytes()
        digest.update(f"\0{name}\0{len(content)}\0".encode())
        digest.update(content)
        if name.endswith(".j2"):
            facts |= {found[1:] for found in _FACT.findall(content.decode())}
    return TemplateInputs(digest.hexdigest(), tuple(sorted(facts)))


def template_digests() -> frozenset[str]:
    """Return the digest of every kernel template that is installed."""
    root = template_root()
    return frozenset(template_inputs(folder).digest for folder in kernel_folders(root))


def kernel_folders(root: Path) -> list[str]:
    """Return the folder of every kernel, relative to ``root``: those that no other is in."""
    folders = [path for path in sorted(root.glob("kernels/**/")) if path != root / "kernels"]
    inner = {path.parent for path in folders}
    return [path.relative_to(root).as_posix() for path in folders if path not in inner]


def spec_facts(spec: KernelSpec) -> dict[str, Fact]:
    """Return what the templates of ``spec`` read of it, by dotted name.

    A shared template may read what a family lacks, on a branch that this family does not take.
    Raises TypeError if a template reads what is no plain data, such as a method.
    """
    facts: dict[str, Fact] = {}
    for name in template_inputs(spec.folder).facts:
        try:
            value = attrgetter(name)(spec)
        except AttributeError:
            continue
        parts = value if type(value) is tuple else (value,)
        if not all(isinstance(part, (bool, int, str)) for part in parts):
            raise TypeError(f"spec.{name}: expected a number, a text or a tuple, got {value!r}")
        facts[name] = value
    return facts


def key_facts(spec: KernelSpec) -> dict[str, str]:
    """Return the facts as text, a list as its SHA-256, without those that the spec's text has."""
    named = spec.key_fields()
    texts = {}
    for name, fact in spec_facts(spec).items():
        if isinstance(fact, tuple):
            texts[name] = hashlib.sha256("\n".join(map(str, fact)).encode()).hexdigest()
        elif named.get(name.rpartition(".")[2]) != str(fact):
            texts[name] = str(fact)
    return texts
