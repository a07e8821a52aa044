"""An installation in an archive: templates lie in folders, and an import from elsewhere says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "mlagen.cache_tools"
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
    with ZipFile(path, "w") as packed:
        for folder, place in (("mlagen", ""), ("cache_tools", "mlagen"), ("templates", "mlagen")):
            for file in (ROOT / folder).rglob("*"):
                if file.is_file() and "__pycache__" not in file.parts:
                    packed.write(file, Path(place, file.relative_to(ROOT)))
    return path


NO_FOLDER = "templates: expected a folder, got none"
COMMANDS: dict[str, tuple[list[str], int]] = {
    "a call": (["-c", CALL], 0),
    "a command that needs templates": (["-m", TOOLS, "prewarm", "--arch", "sm_80"], 3),
    "doctor, which lists it as a problem": (["-m", TOOLS, "doctor"], 1),
}


@pytest.mark.parametrize(("arguments", "code"), COMMANDS.values(), ids=COMMANDS)
def test_a_package_in_an_archive_says_that_it_must_be_unpacked(
    arguments: list[str], code: int, archive: Path
) -> None:
    """The error is one of mlagen, and names the folder that is not there."""
    path = [str(archive), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}

    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=archive.parent,
        env=environ,
        check=False,
        capture_output=True,
        text=True,
    )

    assert ran.returncode == code
    assert NO_FOLDER in ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr
    if arguments[0] == "-c":
        assert ran.stdout.startswith(f"{NO_FOLDER}: {archive / 'mlagen/templates'}; install ")
        assert ran.stdout.count("\n") == 1
