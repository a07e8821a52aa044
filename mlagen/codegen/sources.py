"""Where the templates are, and the digests that stand for everything rendering depends on.

Imports no Jinja: a warm process needs a digest and never renders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from mlagen.codegen.includes import transitive_includes
from mlagen.errors import ToolchainError
from mlagen.paths import is_folder

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def template_root() -> Path:
    """Return the folder of the templates: inside the installed package, or beside it.

    Raises
    ------
    ToolchainError
        If neither is a folder, as in an installation that is imported from a zip archive.
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
def template_digest(folder: str) -> str:
    """Return the SHA-256 of all that the kernels with a ``folder`` are rendered from.

    These are every file that such a kernel may include, the code that renders, and the specs. An
    edit of a file that only other kernels include does not change it.

    Raises
    ------
    CompileError
        If an ``#include`` cannot be resolved.
    """
    root = template_root()
    files = {name: root / name for name in transitive_includes(root, folder)}
    return _digest_of(files, folder, _code_digest())


def template_digests() -> frozenset[str]:
    """Return the digest of every kernel template that is installed."""
    root = template_root()
    return frozenset(template_digest(folder) for folder in kernel_folders(root))


def kernel_folders(root: Path) -> list[str]:
    """Return the folder of every kernel, relative to ``root``: those that no other is in."""
    folders = [path for path in sorted(root.glob("kernels/**/")) if path != root / "kernels"]
    inner = {path.parent for path in folders}
    return [path.relative_to(root).as_posix() for path in folders if path not in inner]


@cache
def _code_digest() -> str:
    folders = (_PACKAGE / "codegen", _PACKAGE / "spec")
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    return _digest_of({path.relative_to(_PACKAGE).as_posix(): path for path in paths})


def _digest_of(files: Mapping[str, Path], *facts: str) -> str:
    digest = hashlib.sha256("\0".join(facts).encode())
    for name, path in sorted(files.items()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()
