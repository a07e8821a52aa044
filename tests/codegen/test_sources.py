"""Where the templates are, and what their digest stands for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mlagen.codegen import sources
from mlagen.codegen.sources import template_digest, template_root
from tests.cache.builds import ROOT
from tests.kernels import forget


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of what rendering depends on, in the form of a checkout."""
    copy = tmp_path / "checkout/mlagen"
    for folder in ("codegen", "spec", "runtime"):
        shutil.copytree(ROOT / "mlagen" / folder, copy / folder)
    shutil.copytree(ROOT / "templates", copy.parent / "templates")
    monkeypatch.setattr(sources, "_PACKAGE", copy)
    monkeypatch.setattr(sources, "template_root", template_root.__wrapped__)
    return copy


def digest() -> str:
    """Return the digest as a new process would compute it."""
    return template_digest.__wrapped__()


@pytest.mark.parametrize(
    "file",
    [
        "../templates/common/types.cuh",
        "../templates/kernels/mla_sm80/kernel.cu.j2",
        "../templates/kernels/mla_sm80/config.cuh.j2",
        "codegen/environment.py",
        "codegen/linemap.py",
        "spec/mla.py",
        "spec/kernel.py",
    ],
)
def test_editing_what_a_kernel_is_made_of_changes_the_digest(package: Path, file: str) -> None:
    """Plain CUDA, Jinja, the code that renders and the specs it reads are all in it."""
    before = digest()
    edited = package / file
    edited.write_bytes(edited.read_bytes() + b"\n")

    after = digest()

    assert after != before


def test_renaming_a_template_changes_the_digest(package: Path) -> None:
    """Names count: an include finds a file by its name."""
    before = digest()
    block = package.parent / "templates/common/swizzle.cuh"
    block.rename(block.with_name("swizzled.cuh"))

    after = digest()

    assert after != before


@pytest.mark.parametrize(
    "file", ["runtime/plan.py", "codegen/__pycache__/render.cpython-311.pyc", "spec/notes.txt"]
)
def test_what_no_kernel_depends_on_leaves_the_digest(package: Path, file: str) -> None:
    """Launch code, byte code and stray files cost nobody a compile."""
    before = digest()
    edited = package / file
    edited.parent.mkdir(exist_ok=True)
    edited.write_bytes(b"# edited\n")

    after = digest()

    assert after == before


def test_an_installed_package_has_the_digest_of_its_checkout(package: Path) -> None:
    """The place of the templates, beside the package or inside it, does not matter."""
    beside = digest()
    (package.parent / "templates").rename(package / "templates")

    inside = digest()

    assert inside == beside


def test_the_digest_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process reads the templates for its first key only."""
    forget()
    first = template_digest()
    monkeypatch.setattr(sources, "_rendering_inputs", None)

    assert template_digest() == first


def test_the_digest_needs_no_jinja() -> None:
    """A warm process computes it without the engine that renders."""
    code = (
        "import sys; from mlagen.codegen.sources import template_digest; template_digest(); "
        "print('jinja2' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout == "False\n"
