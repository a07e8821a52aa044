"""`mlagen cache show`: one kernel, its source, its log, its manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.prewarming import PrewarmReport

from .conftest import Run, damage


def test_a_kernel_is_shown_with_its_facts(run: Run, cached: PrewarmReport) -> None:
    """The facts say what it is, where it lies and what ptxas said."""
    unit = cached.units[0]

    result = run("cache", "show", unit.key[:8])

    facts = dict(line.strip().split("  ", 1) for line in result.stdout.splitlines())
    facts = {name: text.strip() for name, text in facts.items()}
    assert result.exit_code == 0
    assert facts["kernel"] == "combine_splits sm_80 bf16 dims 512"
    assert facts["key"] == unit.key
    assert Path(facts["folder"]).is_dir()
    assert facts["head_dim_vo"] == "512"
    assert facts["ptxas combine_splits"].startswith(
        f"{unit.registers} registers, 0 bytes spilled, 0 bytes of stack, "
    )
    assert facts["compiled"].endswith(", by prewarm")


@pytest.mark.parametrize(
    ("part", "file"),
    [("--source", "kernel.cu"), ("--log", "build.log"), ("--manifest", "manifest.json")],
)
def test_a_part_is_printed_as_it_lies_on_the_disk(
    part: str, file: str, run: Run, cached: PrewarmReport
) -> None:
    """Source, log and manifest can be redirected to a file."""
    (stored,) = json.loads(run("cache", "show", cached.units[0].key, "--json").stdout)["entries"]

    result = run("cache", "show", cached.units[0].key, part)

    assert result.exit_code == 0
    assert result.stdout == (Path(stored["path"]) / file).read_text(encoding="utf-8")


@pytest.mark.parametrize("part", ["source", "log", "manifest"])
def test_json_carries_the_part_that_is_asked_for(
    part: str, run: Run, cached: PrewarmReport
) -> None:
    """A part joins the document under its own name."""
    key = cached.units[0].key

    plain = json.loads(run("cache", "show", key, "--json").stdout)["entries"][0]
    entry = json.loads(run("cache", "show", key, f"--{part}", "--json").stdout)["entries"][0]

    assert set(entry) - set(plain) == {part}
    assert entry[part]


def test_a_key_that_is_not_cached_exits_with_2(run: Run) -> None:
    """The message says what was looked for."""
    result = run("cache", "show", "123456")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "mlagen: key: expected the beginning of a cached key, got 123456\n"


def test_a_damaged_kernel_is_not_shown(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """What was altered is an error that says what and where."""
    unit = cached.units[0]
    cubin = damage(unit.key, unit.toolchain, cache_dir)

    result = run("cache", "show", unit.key)

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("mlagen: cache: kernel.cubin: expected sha256 ")
    assert result.stderr.endswith(f": {cubin.parent}\n")
