"""Transcripts of the pages are what their commands print; MLAGEN_ACCEPT=1 renews them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from socket import gethostname
from sysconfig import get_path

import pytest

from mlagen.compiler.toolchain import find_nvrtc, options_for
from mlagen.spec.arch import parse_arch
from tests.doc_text import PAGES, ROOT, blocks_of
from tests.doc_transcript import Transcript, of_any_cuda, renewed_mark, toolchain_of

# The machine of a page that has no NVRTC.
SERVE = "serve"


class Shells:
    """The shells of a page, one per machine that its prompts name; all work in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environs: dict[str, dict[str, str]] = {}

    def run(self, machine: str, command: str) -> list[str]:
        """Run a command on a machine; return its output without the names of this machine.

        A command that fails prints its exit code in a last line.
        """
        if machine not in self._environs:
            self._environs[machine] = self._environ(self._folder / f"{machine}-home", machine)
        run = subprocess.run(
            ["/bin/sh", "-c", f'{{ {command}; }} 2>&1 || echo "[exit code $?]"'],
            env=self._environs[machine],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=True,
        )
        output = run.stdout.replace(self._environs[machine]["HOME"], "~")
        output = output.replace(f", on {gethostname()}", ", on node")
        return output.replace(f"{self._folder}/", "").splitlines()

    def _environ(self, home: Path, machine: str) -> dict[str, str]:
        commands = home / "bin"
        commands.mkdir(parents=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MLAGEN_", "XDG_"))
        }
        changes = {
            "HOME": str(home),
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "MLAGEN_LOCK_DIR": str(home / "locks"),
        }
        paths, python = sys.path, f'"{sys.executable}"'
        if machine == SERVE:
            paths, python = [str(_site_without_nvrtc(home / "site"))], f"{python} -S"
            if find_nvrtc().release < (12, 9):  # as the page has it
                changes["MLAGEN_TOOLCHAIN"] = str(find_nvrtc())
        script = commands / "mlagen"
        script.write_text(f'#!/bin/sh\nexec {python} -m cache_tools "$@"\n')
        script.chmod(0o755)
        return inherited | changes | {"PYTHONPATH": os.pathsep.join([str(ROOT), *paths])}


def _site_without_nvrtc(folder: Path) -> Path:
    """Return a folder with all installed packages except NVIDIA's libraries."""
    folder.mkdir()
    for installed in dict.fromkeys((get_path("purelib"), get_path("platlib"))):
        for path in Path(installed).iterdir():
            if not path.name.startswith(("nvidia", "__pycache__")):
                (folder / path.name).symlink_to(path)
    return folder


RENEW = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_transcripts.py"

IMAGE = "docs/how-to/bake-an-image.md"

# The part of a call that needs no GPU.
CALL = (
    "import sys; from mlagen.engine import find_or_build; from mlagen.spec.text import parse_spec; "
    "find_or_build(parse_spec(sys.argv[1]))"
)


def is_accepting() -> bool:
    """Return whether the pages are renewed."""
    return bool(os.environ.get("MLAGEN_ACCEPT"))


def transcript_of(page: str) -> Transcript:
    """Return the comparison that the NVRTC of a page and that of this machine allow."""
    theirs, ours, arch = toolchain_of(page), str(find_nvrtc()), parse_arch("sm_100f")
    return Transcript(
        is_same_compiler=is_accepting() or theirs == ours,
        has_equal_keys=is_accepting() or options_for(arch, theirs) == options_for(arch, ours),
    )


def with_blocks(language: str) -> list[str]:
    """Return the pages with a block of ``language``."""
    texts = {page: path.read_text(encoding="utf-8") for page, path in PAGES.items()}
    return [
        page
        for page, text in texts.items()
        if language in {block.language for block in blocks_of(text)}
    ]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", with_blocks("console"))
def test_a_transcript_is_what_its_commands_print(page: str, tmp_path: Path) -> None:
    """The commands of a page, from first to last in fresh home folders, print what it shows."""
    text = PAGES[page].read_text(encoding="utf-8")
    transcript = transcript_of(text)
    renewed = transcript.replay(text, Shells(tmp_path).run)
    if is_accepting():
        PAGES[page].write_text(renewed_mark(renewed, str(find_nvrtc())), encoding="utf-8")
    else:
        assert transcript.differences == [], RENEW


def test_the_miss_of_a_call_is_the_one_shown(tmp_path: Path) -> None:
    """The page on images shows the error of a server without a kernel and without NVRTC."""
    text = PAGES[IMAGE].read_text("utf-8")
    (shown,) = (block.text.strip() for block in blocks_of(text) if block.language == "text")
    kernel = shown.split(": ")[1]

    call = f"'{sys.executable}' -S -c '{CALL}' '{kernel}'"
    *_, printed, code = Shells(tmp_path).run(SERVE, call)

    if is_accepting():
        PAGES[IMAGE].write_text(text.replace(shown, printed), "utf-8")
    else:
        assert (of_any_cuda(printed), code) == (of_any_cuda(shown), "[exit code 1]"), RENEW
