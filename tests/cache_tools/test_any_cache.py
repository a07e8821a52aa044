"""Every command in every cache state: an exit code, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cache_tools.options.exit_codes import CACHE_UNUSABLE, DONE, FAILED, USAGE

from .altered import snapshot
from .conftest import ROOT, Run
from .many import fill

SPEC = "combine(arch=sm_90a, dtype=bf16, head_dim_vo=512)"
# A command that names a missing kernel.
ASKING = ("cache", "why", SPEC)

# Commands, and their exit code on an empty cache.
LOOKING = {
    ("cache", "dir"): DONE,
    ("cache", "ls"): DONE,
    ("cache", "ls", "--layers", "--sort", "spills", "--arch", "sm_90a"): DONE,
    ("cache", "stats"): DONE,
    ("cache", "show", "KEY"): USAGE,
    ASKING: FAILED,
    ("cache", "why", "KEY"): USAGE,
    ("cache", "explain", "KEY", "KEY"): USAGE,
    ("cache", "verify"): DONE,
    ("cache", "prune", "--max-size", "0", "--dry-run"): DONE,
    ("resources", "--fail-on-spill"): DONE,
}
REMOVING = {
    ("cache", "prune", "--max-size", "0"): DONE,
    ("cache", "gc"): DONE,
    ("cache", "rm", "KEY"): USAGE,
    ("cache", "clear", "--yes"): DONE,
}
EVERY = {**LOOKING, **REMOVING}


def typed(arguments: tuple[str, ...], key: str = "abcdef") -> list[str]:
    """Return the words of a command line."""
    return [key if word == "KEY" else word for word in arguments]


def shown(arguments: tuple[str, ...]) -> str:
    """Return the id of a case."""
    return "why a spec" if arguments == ASKING else " ".join(arguments)


every_command = pytest.mark.parametrize("arguments", EVERY, ids=shown)


@every_command
def test_a_missing_cache_is_not_created(
    arguments: tuple[str, ...], run: Run, cache_dir: Path
) -> None:
    """Neither a look nor a removal of absent kernels creates the cache."""
    result = run(*typed(arguments))

    assert result.exit_code == EVERY[arguments], result.stderr
    assert not cache_dir.exists()


@every_command
@pytest.mark.parametrize("folders", ["", "v1/e", "v1/e/ab"])
def test_an_empty_cache_has_no_kernels(
    folders: str, arguments: tuple[str, ...], run: Run, cache_dir: Path
) -> None:
    """An empty cache counts as empty with any subset of its folders."""
    (cache_dir / folders).mkdir(parents=True)
    cache_dir.chmod(0o700)

    result = run(*typed(arguments), "--json")

    assert result.exit_code == EVERY[arguments], result.stderr
    assert (result.stdout == "") == (EVERY[arguments] == USAGE)


@every_command
def test_a_file_in_place_of_the_cache_is_no_cache(
    arguments: tuple[str, ...], run: Run, cache_dir: Path
) -> None:
    """A file in place of the cache is neither read nor removed."""
    cache_dir.write_text("a file")

    result = run(*typed(arguments))

    assert result.exit_code in {EVERY[arguments], CACHE_UNUSABLE}, result.stderr
    assert cache_dir.read_text() == "a file"


FACTS: dict[str, object] = {"kernel": {"spec": []}, "resources": None, "compile_ms": "long"}

# Damage of a manifest, by its name.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "invalid JSON": lambda manifest: manifest.write_text("{"),
    "other types, and no valid seal": lambda manifest: manifest.write_text(
        json.dumps({**json.loads(manifest.read_text()), "facts": FACTS})
    ),
    "few names": lambda manifest: manifest.write_text(json.dumps({"schema": 1, "seal": ""})),
    "none": lambda manifest: manifest.unlink(),
    "a link": lambda manifest: manifest.symlink_to(
        manifest.rename(manifest.with_name("elsewhere.json")).name
    ),
}


@every_command
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_reported_and_hides_nothing_else(
    damage: Callable[[Path], object], arguments: tuple[str, ...], run: Run, cache_dir: Path
) -> None:
    """A list continues after a damaged kernel, and a command for that kernel reports its damage."""
    key, *_ = fill(cache_dir, 3)
    damage(next((cache_dir / "v1" / "e" / key[:2] / key).glob("*/manifest.json")))

    result = run(*typed(arguments, key))

    expected = {"show": 4, "explain": 4, "verify": 1, "why": 1 if arguments == ASKING else 4}
    assert result.exit_code == expected.get(arguments[1], DONE), result.stderr
    if result.exit_code == CACHE_UNUSABLE:
        assert result.stderr.startswith("mlagen: cache: ")
        assert result.stderr.count("\n") == 1


def run_without_privileges(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that obeys file modes, even if root starts it."""
    script = (
        "from tests.faults.privileges import give_up_capabilities; give_up_capabilities();"
        "from cache_tools.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
    )


@every_command
def test_a_read_only_cache_can_be_listed(arguments: tuple[str, ...], cache_dir: Path) -> None:
    """In a read-only cache a removal is an error of one line, and changes nothing."""
    key, *_ = fill(cache_dir, 3)
    for folder in (cache_dir, *(path for path in cache_dir.rglob("*") if path.is_dir())):
        folder.chmod(0o500)
    before = snapshot(cache_dir)

    ran = run_without_privileges(*typed(arguments, key), "--json")

    is_rejected = arguments in REMOVING and arguments != ("cache", "gc")
    code = CACHE_UNUSABLE if is_rejected else FAILED if arguments == ASKING else DONE
    assert ran.returncode == code, ran.stderr
    assert (ran.stdout == "") == is_rejected
    assert ran.stderr.startswith("mlagen: cache: expected a writable folder, got ") == is_rejected
    assert "Traceback" not in ran.stderr
    assert snapshot(cache_dir) == before


@every_command
def test_a_cache_that_cannot_be_read_is_an_error(
    arguments: tuple[str, ...], cache_dir: Path
) -> None:
    """An unreadable cache is an error, not an empty cache."""
    key, *_ = fill(cache_dir, 1)
    (cache_dir / "v1" / "e").chmod(0o000)

    ran = run_without_privileges(*typed(arguments, key))

    needs_no_list = arguments in {("cache", "dir"), ("cache", "gc")}
    is_error = ran.stderr.startswith("mlagen: cache: expected a readable folder, got Permission ")
    assert ran.returncode == (DONE if needs_no_list else CACHE_UNUSABLE), ran.stderr
    assert is_error != needs_no_list
    assert "Traceback" not in ran.stderr
