"""Wheel and source distribution: their contents, and that they work where they are unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import mlagen

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"mlagen": "mlagen", "cache_tools": "mlagen/cache_tools", "templates": "mlagen/templates"}
SHIPPED = {".py", ".typed", ".tsv", ".cuh", ".j2"}

# Files that tools write into a checkout.
TOOL_FILES = (
    *(".git", ".venv*", "*.egg-info", "build", "dist", "__pycache__", "*.pyc", ".coverage"),
    *(".*_cache", ".hypothesis"),
)
# argv: build_wheel, build_editable or build_sdist, the folder for the result
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
OLDEST_SETUPTOOLS = 77  # as [build-system] of pyproject.toml
try:
    release = Version(metadata.version("setuptools")).major
except metadata.PackageNotFoundError:
    release = 0


pytestmark = pytest.mark.skipif(
    release < OLDEST_SETUPTOOLS,
    reason=f"needs setuptools {OLDEST_SETUPTOOLS} or newer to build the wheel",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the build's inputs, so that a build does not touch the checkout."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module")
def site(checkout: Path) -> Path:
    """Return a folder with the unpacked wheel, as an installation has."""
    return unpack("build_wheel", checkout)


def unpack(build: str, checkout: Path) -> Path:
    """Build with setuptools without a network; return the folder with the wheel's content."""
    site = checkout.parent / build
    site.mkdir()
    run_python("-c", BUILD, build, str(site), cwd=checkout)
    (wheel,) = site.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    wheel.unlink()
    return site


def run_python(*arguments: str, cwd: Path, site: Path | None = None) -> str:
    """Run a fresh interpreter with ``site`` first on its path; return its output."""
    path = ([str(site)] if site else []) + [entry for entry in sys.path if entry != str(ROOT)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-B", *arguments]
    run = subprocess.run(command, cwd=cwd, env=environ, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def test_the_wheel_has_code_data_templates_and_markers_alone(site: Path) -> None:
    """It has every file of the checkout, below `mlagen`, and no tests or documents."""
    expected = {
        Path(installed) / path.relative_to(ROOT / folder)
        for folder, installed in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED
    }
    files = {path.relative_to(site) for path in site.rglob("*") if path.is_file()}
    assert len(expected) > 100
    assert expected == {path for path in files if ".dist-info" not in path.parts[0]}


def test_an_editable_installation_has_the_command_line_too(checkout: Path) -> None:
    """`pip install -e .` gives a working `mlagen` command with the checkout's templates."""
    site = unpack("build_editable", checkout)
    code = (
        "import site, sys; site.addsitedir(sys.argv[1]);"
        "from mlagen.cache_tools.cli import main;"
        "from mlagen.codegen.sources import template_root; print(template_root())"
    )
    # -S: hides an editable mlagen of this environment.
    templates = run_python("-S", "-c", code, str(site), cwd=site, site=site)
    assert templates == str(checkout / "templates")


WHOLE = """
import mlagen
from mlagen.cache_tools.__main__ import main
from mlagen.codegen.sources import template_root
from mlagen.models.config import find_model
print(template_root(), find_model("kimi-k2").heads, callable(main), mlagen.__version__)
"""


def test_an_installation_is_whole(site: Path) -> None:
    """It finds its own templates and models, its command line and its version."""
    printed = run_python("-c", WHOLE, cwd=site.parent, site=site)
    assert printed == f"{site}/mlagen/templates 64 True {mlagen.__version__}"


def test_metadata_of_the_wheel(site: Path) -> None:
    """They have Pythons, versions of CUDA, authors, version, license, command and dependencies.

    `make oldest` installs the lowest versions of these.
    """
    (folder,) = site.glob("*.dist-info")
    lines = (folder / "METADATA").read_text(encoding="utf-8").splitlines()
    pythons = [f"3.{minor}" for minor in range(10, 15)]
    classifiers = {line.removeprefix("Classifier: ") for line in lines}
    named = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist: " in line]

    assert {f"Programming Language :: Python :: {version}" for version in pythons} <= classifiers
    assert {f"Environment :: GPU :: NVIDIA CUDA :: {major}" for major in (12, 13)} <= classifiers
    assert f"Requires-Python: >={pythons[0]}" in lines
    assert {"Author: The mlagen authors", f"Version: {mlagen.__version__}"} <= set(lines)
    assert "Apache License" in (folder / "licenses/LICENSE").read_text(encoding="utf-8")
    command = "mlagen = mlagen.cache_tools.__main__:main"
    assert command in (folder / "entry_points.txt").read_text(encoding="utf-8").splitlines()
    assert "torch>=2.8" in named
    for requirement in (Requirement(text) for text in named if "extra ==" not in text):
        assert [bound.operator for bound in requirement.specifier] == [">="], requirement


@pytest.mark.parametrize(
    ("group", "server"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")]
)
def test_a_server_finds_its_plugin(site: Path, group: str, server: str) -> None:
    """The entry point that a server looks for is the function that registers the backends."""
    (folder,) = site.glob("*.dist-info")
    entry_points = ConfigParser()
    entry_points.read(folder / "entry_points.txt")

    point = metadata.EntryPoint("mlagen", entry_points[group]["mlagen"], group)

    assert point.load() is import_module(f"mlagen.integrations.{server}").register


def test_the_public_names_can_be_listed() -> None:
    """`dir(mlagen)` lists the lazy names, and loads none."""
    code = "import mlagen, sys; print(*dir(mlagen)); print('torch' in sys.modules)"
    names, is_loaded = run_python("-c", code, cwd=ROOT, site=ROOT).splitlines()
    assert set(mlagen.__all__) <= set(names.split())
    assert is_loaded == "False"
    for name in mlagen.__all__:
        assert getattr(mlagen, name) is not None


def test_a_source_distribution_has_every_file_of_the_checkout(tmp_path: Path) -> None:
    """Tests, documents, change log, Makefile and scripts are included, with their modes."""
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*TOOL_FILES))
    files = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    if git := shutil.which("git"):
        listed = subprocess.run([git, "ls-files"], cwd=ROOT, capture_output=True, check=False)
        files &= {Path(os.fsdecode(line)) for line in listed.stdout.splitlines()} or files

    run_python("-c", BUILD, "build_sdist", str(tmp_path), cwd=copy)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")

    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    programs = {path for path in files if os.access(ROOT / path, os.X_OK)}
    assert len(files) > 300
    assert {path for path in files if not (unpacked / path).is_file()} == set()
    assert {path for path in programs if not os.access(unpacked / path, os.X_OK)} == set()
