"""Wheel and source distribution: their contents, and that they work where they are unpacked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib import import_module, metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import mlagen

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"mlagen": "mlagen", "cache_tools": "mlagen/cache_tools", "templates": "mlagen/templates"}
SHIPPED = {".py", ".typed", ".json", ".cuh", ".j2"}

# argv: build_wheel or build_editable, the folder for the result
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
OLDEST_SETUPTOOLS = 77  # as [build-system] of pyproject.toml


def setuptools_release() -> int:
    """Return the major version of the installed setuptools, 0 where there is none."""
    try:
        return Version(metadata.version("setuptools")).major
    except metadata.PackageNotFoundError:
        return 0


pytestmark = pytest.mark.skipif(
    setuptools_release() < OLDEST_SETUPTOOLS,
    reason=f"needs setuptools {OLDEST_SETUPTOOLS} or newer to build the wheel",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the build's inputs, so that a build does not touch the checkout."""
    copy = tmp_path_factory.mktemp("packaging") / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
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
    with ZipFile(wheel) as archive:
        archive.extractall(site)
    wheel.unlink()
    return site


def run_python(*arguments: str, cwd: Path, site: Path | None = None) -> str:
    """Run a fresh interpreter with ``site`` first on its path; return its output."""
    path = ([str(site)] if site else []) + [entry for entry in sys.path if entry != str(ROOT)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-B", *arguments]
    run = subprocess.run(command, cwd=cwd, env=environ, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def run_installed(site: Path, code: str) -> str:
    """Run ``code`` with the unpacked wheel on the path, outside of the checkout."""
    return run_python("-c", code, cwd=site.parent, site=site)


def metadata_file(site: Path, name: str) -> str:
    """Return one text file of the wheel's metadata."""
    (folder,) = site.glob("*.dist-info")
    return (folder / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_source_file_is_in_the_wheel(folder: str, site: Path) -> None:
    """The wheel has every module, template and marker file of the checkout."""
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in SHIPPED]
    expected = {FOLDERS[folder] / path.relative_to(ROOT / folder) for path in files}
    installed = {path.relative_to(site) for path in site.rglob("*")}
    assert expected
    assert expected - installed == set()


def test_nothing_but_code_data_templates_and_markers_is_installed(site: Path) -> None:
    """`mlagen` is the only name, and tests, documents and editor files are not in the wheel."""
    installed = {path.name for path in site.iterdir() if path.suffix != ".dist-info"}
    files = [path for path in (site / "mlagen").rglob("*") if path.is_file()]
    assert installed == {"mlagen"}
    assert {path.suffix for path in files} == SHIPPED


def test_an_editable_installation_has_the_command_line_too(checkout: Path) -> None:
    """`pip install -e .` gives a working `mlagen` command with the checkout's templates."""
    site = unpack("build_editable", checkout)
    code = """
import site, sys
site.addsitedir(sys.argv[1])
from mlagen.cache_tools.cli import main
from mlagen.codegen.sources import template_root
print(template_root())
"""

    # -S: hides an editable mlagen of this environment.
    templates = run_python("-S", "-c", code, str(site), cwd=site, site=site)

    assert templates == str(checkout / "templates")


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (
            "from mlagen.codegen.sources import template_root; print(template_root())",
            "{site}/mlagen/templates",
        ),
        ("from mlagen.models.config import find_model; print(find_model('kimi-k2').heads)", "64"),
        ("from mlagen.cache_tools.__main__ import main; print(callable(main))", "True"),
        ("import mlagen; print(mlagen.__version__)", mlagen.__version__),
    ],
    ids=["templates", "models", "the command line", "the version"],
)
def test_an_installation_is_whole(code: str, output: str, site: Path) -> None:
    """It finds its own templates and models, its command line and its version."""
    assert run_installed(site, code) == output.format(site=site)


def test_metadata_of_the_wheel(site: Path) -> None:
    """They have Pythons, versions of CUDA, authors, version, licence and the command."""
    lines = metadata_file(site, "METADATA").splitlines()
    pythons = [f"3.{minor}" for minor in range(10, 15)]

    classifiers = {line.removeprefix("Classifier: ") for line in lines}
    assert {f"Programming Language :: Python :: {version}" for version in pythons} <= classifiers
    assert {f"Environment :: GPU :: NVIDIA CUDA :: {major}" for major in (12, 13)} <= classifiers
    assert f"Requires-Python: >={pythons[0]}" in lines
    assert {"Author: The mlagen authors", f"Version: {mlagen.__version__}"} <= set(lines)
    assert "Apache License" in metadata_file(site, "licenses/LICENSE")
    entry_points = metadata_file(site, "entry_points.txt").splitlines()
    assert "mlagen = mlagen.cache_tools.__main__:main" in entry_points


@pytest.mark.parametrize(
    ("group", "server"), [("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")]
)
def test_a_server_finds_its_plugin(site: Path, group: str, server: str) -> None:
    """The entry point that a server looks for is the function that registers the backends."""
    entry_points = ConfigParser()
    entry_points.read_string(metadata_file(site, "entry_points.txt"))

    point = metadata.EntryPoint("mlagen", entry_points[group]["mlagen"], group)

    assert point.load() is import_module(f"mlagen.integrations.{server}").register


def test_each_dependency_has_a_lowest_version(site: Path) -> None:
    """`make oldest` installs the lowest versions."""
    lines = metadata_file(site, "METADATA").splitlines()
    named = [line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist: " in line]
    needed = [Requirement(text) for text in named if "extra ==" not in text]
    assert "torch>=2.8" in named
    for requirement in needed:
        assert [bound.operator for bound in requirement.specifier] == [">="], requirement


def test_the_public_names_can_be_listed() -> None:
    """`dir(mlagen)` lists the lazy names, and loads none."""
    code = "import mlagen, sys; print(*dir(mlagen)); print('torch' in sys.modules)"
    names, is_loaded = run_python("-c", code, cwd=ROOT, site=ROOT).splitlines()
    assert set(mlagen.__all__) <= set(names.split())
    assert is_loaded == "False"
    for name in mlagen.__all__:
        assert getattr(mlagen, name) is not None
