"""A compilation database for clangd: how each plain template is compiled, alone.

    python3 -m tests.templates.compile_commands [FOLDER]

writes ``compile_commands.json`` there, or at the top of the checkout. Templates with Jinja are
rendered into ``build/clangd``, for a kernel of each family and choice of files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mlagen.codegen.render import rendered_file
from mlagen.codegen.sources import template_root
from mlagen.spec.kernel import KernelSpec
from tests.kernels import SM_90A

from .headers import Variant, own_name, variants

CHECKOUT = Path(__file__).resolve().parents[2]
BUILTINS = Path(__file__).with_name("nvrtc_builtins.h")


def write_database(folder: Path) -> list[dict[str, Any]]:
    """Write the rendered templates and ``compile_commands.json`` into ``folder``."""
    database = []
    for number, (variant, names) in enumerate(_shares()):
        rendered = folder / f"build/clangd/{variant.spec.family}-{number}"
        _render(variant, rendered)
        database += [_command(name, variant.spec, rendered) for name in names]
    database.sort(key=lambda entry: str(entry["file"]))
    (folder / "compile_commands.json").write_text(json.dumps(database, indent=1) + "\n")
    return database


def _shares() -> list[tuple[Variant, list[str]]]:
    """Return variants that have every plain template, with those each is to compile."""
    shares: list[tuple[Variant, list[str]]] = []
    seen: set[str] = set()
    for variant in sorted(variants(), key=lambda variant: variant.spec.arch != SM_90A):
        plain = [name for name in variant.headers if name.endswith(".cuh") and name not in seen]
        if plain:
            shares.append((variant, plain))
            seen.update(plain)
    return shares


def _render(variant: Variant, folder: Path) -> None:
    """Write what the templates with Jinja are for a variant, by the names that are included."""
    for name in variant.headers:
        if name.endswith(".j2"):
            file = folder / own_name(name, variant.spec)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("\n".join(rendered_file(name, variant.spec).lines))


def _command(name: str, spec: KernelSpec, rendered: Path) -> dict[str, Any]:
    root = template_root()
    folder = Path(spec.folder)
    folders = (rendered, root / folder, *(root / above for above in folder.parents))
    arguments = [
        *("clang++", "-x", "cuda", "-std=c++17", "--cuda-device-only", "-nocudainc", "-nocudalib"),
        f"--cuda-gpu-arch={spec.arch}",
        *("-include", str(BUILTINS)),
        *(f"-I{folder}" for folder in folders),
        *("-Wno-c++11-narrowing", "-Wno-pragma-once-outside-header", "-Wno-unknown-cuda-version"),
    ]
    file = str(root / name)
    return {"directory": str(root.parent), "file": file, "arguments": [*arguments, file]}


if __name__ == "__main__":
    write_database(Path(sys.argv[1]) if sys.argv[1:] else CHECKOUT)
