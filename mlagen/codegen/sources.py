"""Where the templates are, and the digest that stands for everything rendering depends on.

Imports no Jinja: a warm process needs the digest and never renders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
def template_digest() -> str:
    """Return the SHA-256 of the templates, the code that renders them and the specs they read."""
    digest = hashlib.sha256()
    for name, path in sorted(_rendering_inputs()):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _rendering_inputs() -> Iterator[tuple[str, Path]]:
    for folder, patterns in (
        (template_root(), ("**/*.cuh", "**/*.j2")),
        (_PACKAGE / "codegen", ("*.py",)),
        (_PACKAGE / "spec", ("*.py",)),
    ):
        for pattern in patterns:
            for path in folder.glob(pattern):
                yield f"{folder.name}/{path.relative_to(folder).as_posix()}", path
