"""Source distribution: the whole checkout, whose tests pass where it is unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.test_packaging import ROOT, pytestmark, run_python

__all__ = ["pytestmark"]  # it needs setuptools too

BUILD = "import sys; from setuptools import build_meta as b; b.build_sdist(sys.argv[1])"
# Files that tools write into a checkout.
TOOL_FILES = (
    *(".git", ".venv*", "*.egg-info", "build", "dist", "__pycache__", "*.pyc", ".coverage"),
    *(".*_cache", ".hypothesis"),
)
# Tests that read documents, templates and other files of the checkout.
SAMPLE = ("tests/test_docs.py", "tests/templates/test_golden.py", "tests/spec/test_families.py")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout without the files of tools."""
    copy = tmp_path_factory.mktemp("sdist") / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*TOOL_FILES))
    return copy


@pytest.fixture(scope="module")
def files(checkout: Path) -> set[Path]:
    """Return the files of the checkout: those tracked by git, if it is a repository."""
    if git := shutil.which("git"):
        listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, check=False)
        tracked = {Path(os.fsdecode(line)) for line in listed.stdout.splitlines()}
        if there := {path for path in tracked if (checkout / path).is_file()}:
            return there
    return {path.relative_to(checkout) for path in checkout.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def unpacked(checkout: Path, files: set[Path]) -> Path:
    """Return the folder of the unpacked source distribution."""
    assert files
    target = checkout.parent
    run_python("-c", BUILD, str(target), cwd=checkout)
    (archive,) = target.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(target, filter="data")
    return target / archive.name.removesuffix(".tar.gz")


def test_every_file_of_the_checkout_is_in_it(unpacked: Path, files: set[Path]) -> None:
    """Tests, documents, change log, Makefile and scripts are included, with their modes."""
    missing = {path for path in files if not (unpacked / path).is_file()}
    programs = {path for path in files if os.access(ROOT / path, os.X_OK)}
    assert missing == set()
    assert {path for path in programs if not os.access(unpacked / path, os.X_OK)} == set()


def test_its_own_tests_are_found_and_pass(unpacked: Path) -> None:
    """Those that read other files than Python."""
    options = ("-p", "no:cacheprovider", "-m", "not gpu", "--assert=plain")
    quick = ("-k", "not recorded_resources")  # these compile
    command = [sys.executable, "-m", "pytest", *options, *quick, *SAMPLE]
    environ = {**os.environ, "PYTHONPATH": str(unpacked)}
    ran = subprocess.run(
        command, cwd=unpacked, env=environ, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert [path for path in SAMPLE if f"\n{path} " not in ran.stdout] == []
