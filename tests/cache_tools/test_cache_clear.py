"""`mlagen cache clear`: removes everything, only after confirmation."""

from __future__ import annotations

import json
from pathlib import Path

from mlagen.cache.default_store import kernel_store
from mlagen.prewarming import PrewarmReport

from .conftest import Run


def count() -> int:
    """Return the number of entries in the cache."""
    return len(list(kernel_store().entries()))


def test_yes_removes_everything(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """--yes skips the question."""
    result = run("cache", "clear", "--yes")

    assert len(cached.units) == 2
    assert (result.exit_code, result.stdout) == (0, f"removed 2 kernels from {cache_dir}\n")
    assert count() == 0


def test_the_question_names_the_kernels(run: Run, cached: PrewarmReport, cache_dir: Path) -> None:
    """The question has count, size and folder, and the answer y removes them."""
    result = run("cache", "clear", answer="y\n")

    assert len(cached.units) == 2
    assert result.stdout.startswith("Remove 2 kernels, ")
    assert f" from {cache_dir}? [y/N] " in result.stdout
    assert result.exit_code == 0
    assert count() == 0


def test_no_keeps_everything(run: Run, cached: PrewarmReport) -> None:
    """Any answer but yes changes nothing, and the exit code is 1."""
    result = run("cache", "clear", answer="n\n")

    assert result.exit_code == 1
    assert result.stdout.endswith("nothing removed\n")
    assert count() == len(cached.units)


def test_no_answer_keeps_everything(run: Run, cached: PrewarmReport) -> None:
    """At the end of stdin the command is interrupted, and names --yes."""
    result = run("cache", "clear")

    assert result.exit_code == 130
    assert result.stdout.endswith("no answer, nothing removed; --yes skips the question\n")
    assert result.stderr.endswith("mlagen: interrupted\n")
    assert count() == len(cached.units)


def test_an_empty_cache_needs_no_question(run: Run, cache_dir: Path) -> None:
    """An empty cache prompts for nothing and creates nothing."""
    result = run("cache", "clear")

    assert (result.exit_code, result.stdout) == (0, f"removed 0 kernels from {cache_dir}\n")
    assert not cache_dir.exists()


def test_json_keeps_stdout_for_the_document(
    run: Run, cached: PrewarmReport, cache_dir: Path
) -> None:
    """With --json the question goes to stderr."""
    result = run("cache", "clear", "--json", answer="y\n")

    assert json.loads(result.stdout) == {"cache_dir": str(cache_dir), "removed": len(cached.units)}
    assert result.stderr.startswith("Remove 2 kernels, ")
