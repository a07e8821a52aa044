"""`mlagen cache show`: one kernel, its source, its log, its manifest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cache_tools.tools import disassembly
from cache_tools.tools.disassembly import find_nvdisasm
from mlagen.errors import ToolchainError
from mlagen.prewarming import PrewarmReport

from .altered import folder_of, recast
from .conftest import Run, damage


def test_a_kernel_is_shown_with_its_facts(run: Run, cached: PrewarmReport) -> None:
    """The facts have the kernel, its path and the resources of ptxas."""
    unit = cached.units[0]

    result = run("cache", "show", unit.key[:8])

    facts = dict(line.strip().split("  ", 1) for line in result.stdout.splitlines())
    facts = {name: text.strip() for name, text in facts.items()}
    assert result.exit_code == 0
    assert facts["kernel"] == "combine sm_80 bf16 dims 512"
    assert facts["key"] == unit.key
    assert Path(facts["folder"]).is_dir()
    assert facts["head_dim_vo"] == "512"
    assert facts["ptxas combine"].startswith(
        f"{unit.registers} registers, 0 bytes spilled, 0 bytes of stack, "
    )
    assert facts["compiled"].endswith(", by prewarm, because: absent")


@pytest.mark.parametrize(
    ("part", "file"),
    [("--source", "kernel.cu"), ("--log", "build.log"), ("--manifest", "manifest.json")],
)
def test_a_part_is_printed_byte_for_byte(
    part: str, file: str, run: Run, cached: PrewarmReport
) -> None:
    """Source, log and manifest can be redirected to a file."""
    (stored,) = json.loads(run("cache", "show", cached.units[0].key, "--json").stdout)["entries"]

    result = run("cache", "show", cached.units[0].key, part)

    assert result.exit_code == 0
    assert result.stdout == (Path(stored["path"]) / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("part", ["source", "log", "manifest"])
def test_json_has_the_requested_part(part: str, run: Run, cached: PrewarmReport) -> None:
    """A part has its own name in the document."""
    key = cached.units[0].key

    plain = json.loads(run("cache", "show", key, "--json").stdout)["entries"][0]
    entry = json.loads(run("cache", "show", key, f"--{part}", "--json").stdout)["entries"][0]

    assert set(entry) - set(plain) == {part}
    assert entry[part]


def test_a_key_that_is_not_cached_exits_with_2(run: Run) -> None:
    """The message has the key."""
    result = run("cache", "show", "123456")

    assert (result.exit_code, result.stdout) == (2, "")
    rule = "expected a prefix of a cached key (mlagen cache ls)"
    assert result.stderr == f"mlagen: key: {rule}, got 123456\n"


def test_two_parts_at_once_are_rejected(run: Run) -> None:
    """A second part is an error, not ignored."""
    result = run("cache", "show", "123456", "--source", "--log")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mlagen: part: expected one, got --source and --log; see: ")


def test_a_damaged_kernel_is_not_shown(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """Damage is an error with the reason and the path."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)

    result = run("cache", "show", unit.key)

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("mlagen: cache: kernel.cubin: expected sha256 ")
    assert result.stderr.endswith(f": {cubin.parent}\n")


def nvdisasm_is_missing() -> bool:
    """Return whether nvdisasm is not installed."""
    try:
        find_nvdisasm()
    except ToolchainError:
        return True
    return False


@pytest.mark.skipif(
    nvdisasm_is_missing(), reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)
def test_the_sass_is_printed(run: Run, cached: PrewarmReport) -> None:
    """--sass prints the disassembly of the kernel."""
    result = run("cache", "show", cached.units[0].key, "--sass")

    assert result.exit_code == 0, result.stderr
    assert ".text.combine" in result.stdout
    assert "EXIT" in result.stdout


def test_without_nvdisasm_the_message_names_the_package(
    run: Run, cached: PrewarmReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is that of a missing dependency."""

    def missing() -> Path:
        raise ToolchainError("nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm")

    monkeypatch.setattr(disassembly, "find_nvdisasm", missing)

    result = run("cache", "show", cached.units[0].key, "--sass")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "mlagen: nvdisasm: not found; run: pip install nvidia-cuda-nvdisasm\n"


def test_a_program_that_compiles_it_again_is_printed(
    run: Run, cached: PrewarmReport, tmp_path: Path
) -> None:
    """The printed program runs, and confirms the cubin."""
    program = tmp_path / "reproduce.py"

    program.write_text(run("cache", "show", cached.units[0].key, "--reproduce").stdout)

    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith(f"{cached.units[0].spec} by nvrtc-")


def test_every_compiler_is_shown_or_the_one_that_is_named(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """KEY/TOOLCHAIN is one entry, KEY is all of them."""
    unit = cached.units[0]
    recast(folder_of(unit, cache_dir), toolchain="nvrtc-12.8.1", keeps=True)

    every = json.loads(run("cache", "show", unit.key, "--json").stdout)["entries"]
    named = json.loads(run("cache", "show", f"{unit.key}/nvrtc-12.8.1", "--json").stdout)

    assert [entry["toolchain"] for entry in every] == ["nvrtc-12.8.1", unit.toolchain]
    assert named["entries"] == every[:1]
