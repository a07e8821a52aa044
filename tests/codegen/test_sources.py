"""Where the templates are, and what their digest stands for."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlagen.codegen import sources
from mlagen.codegen.sources import template_digest, template_digests, template_root
from mlagen.spec.families import specs_of
from tests.cache.builds import ROOT
from tests.fixture_types import Patch
from tests.kernels import COMBINE, SM_90A, clear_caches


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Return a copy of what rendering depends on, in the form of a checkout."""
    copy = tmp_path / "checkout/mlagen"
    for folder in ("codegen", "spec", "runtime"):
        shutil.copytree(ROOT / "mlagen" / folder, copy / folder)
    shutil.copytree(ROOT / "templates", copy.parent / "templates")
    monkeypatch.setattr(sources, "_PACKAGE", copy)
    monkeypatch.setattr(sources, "template_root", template_root.__wrapped__)
    return copy


def digest(kernel: str = "mla_sm80") -> str:
    """Return the digest of a kernel as a new process would compute it."""
    sources._code_digest.cache_clear()
    return template_digest.__wrapped__(f"kernels/{kernel}")


# Plain CUDA, Jinja, the code that renders and the specs it reads.
READ = (
    *("../templates/common/types.cuh", "../templates/kernels/mla_sm80/kernel.cu.j2"),
    *("../templates/kernels/mla_sm80/config.cuh.j2", "../templates/kernels/mla_sm80/load.cuh"),
    *("codegen/environment.py", "codegen/linemap.py", "spec/mla/sm80.py", "spec/kernel.py"),
)
# Templates of other families, launch code, byte code and stray files.
UNREAD = (
    *("../templates/kernels/gqa_sm90/softmax.cuh", "../templates/kernels/mla_sm90/config.cuh.j2"),
    *("../templates/scheduler/schedule_range.cuh", "../templates/ptx/wgmma.cuh"),
    *("../templates/README.md", "runtime/plan.py", "spec/notes.txt"),
    "codegen/__pycache__/render.cpython-311.pyc",
)


@pytest.mark.parametrize("file", [*READ, *UNREAD])
def test_an_edit_of_what_a_kernel_is_made_of_changes_its_digest(package: Path, file: str) -> None:
    """An edit compiles the kernels that depend on the file, and no other."""
    before = digest()
    edited = package / file
    edited.parent.mkdir(exist_ok=True)
    with edited.open("ab") as appended:
        appended.write(b"\n")
    assert (digest() != before) is (file in READ)


def test_renaming_a_template_changes_the_digest(package: Path) -> None:
    """Names count: an include finds a file by its name, and its ending says what Jinja reads."""
    before = digest()
    file = package.parent / "templates/common/smem_layout.cuh"
    file.rename(file.with_name("smem_layout.cuh.j2"))
    assert digest() != before


def test_every_kernel_has_a_digest_of_its_own() -> None:
    """The digests of an installation are those of its kernels, one each."""
    clear_caches()
    kernels = {spec.folder.removeprefix("kernels/") for spec in specs_of(SM_90A)}
    digests = template_digests()
    assert len(digests) == len(kernels) > 5
    assert digests == {digest(kernel) for kernel in kernels}


def test_an_installed_package_has_the_digest_of_its_checkout(package: Path) -> None:
    """The place of the templates, beside the package or inside it, does not matter."""
    beside = digest()
    (package.parent / "templates").rename(package / "templates")
    assert digest() == beside


def test_the_digest_is_computed_once(monkeypatch: Patch) -> None:
    """A process reads the templates for its first key only."""
    clear_caches()
    first = template_digest(COMBINE.folder)
    monkeypatch.setattr(sources, "transitive_includes", None)
    assert template_digest(COMBINE.folder) == first
