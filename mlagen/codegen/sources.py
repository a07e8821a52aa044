"""Where the templates are, and the digest that stands for everything rendering depends on.

Imports no Jinja: a warm process needs the digest and never renders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


@cache
def template_root() -> Path:
    """Return the folder of the templates: inside the installed package, or beside it."""
    inside = _PACKAGE / "templates"
    return inside if inside.is_dir() else _PACKAGE.parent / "templates"


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
