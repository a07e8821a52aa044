"""An installation in an archive: templates lie in folders, and an import from elsewhere says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
CALL = (
    "import mlagen\n"
    "try:\n"
    "    mlagen.prewarm('sm_80', families=['combine'])\n"
    "except mlagen.ToolchainError as error:\n"
    "    print(error)\n"
)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a zip archive with the package as it is installed."""
    path = tmp_path_factory.mktemp("archive") / "mlagen.zip"
    places = {
        "mlagen": "mlagen",
        "cache_tools": "mlagen/cache_tools",
        "templates": "mlagen/templates",
    }
    with ZipFile(path, "w") as packed:
        for folder, place in places.items():
            for file in (ROOT / folder).rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    packed.write(file, f"{place}/{file.relative_to(ROOT / folder)}")
    return path


def run_archived(archive: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the archive on its path and no checkout."""
    path = [str(archive), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=archive.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_package_in_an_archive_says_that_it_must_be_unpacked(archive: Path) -> None:
    """The error is one of mlagen, and names the folder that is not there."""
    ran = run_archived(archive, "-c", CALL)
    expected = f"templates: expected a folder, got none: {archive / 'mlagen/templates'}; install "
    assert ran.stdout.startswith(expected), ran.stderr
    assert ran.stdout.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "prewarm"])
def test_a_command_in_an_archive_says_the_same(command: str, archive: Path) -> None:
    """Doctor lists it as a problem, and what needs templates ends with exit code 3."""
    options = ("--arch", "sm_80") if command == "prewarm" else ()
    ran = run_archived(archive, "-m", "mlagen.cache_tools", command, *options)
    assert ran.returncode == {"doctor": 1, "prewarm": 3}[command]
    assert "templates: expected a folder, got none" in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
