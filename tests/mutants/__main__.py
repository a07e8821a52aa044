"""Runs the mutants of the kernels: each breaks one line, and a named test has to fail.

    python3 -m tests.mutants [NAME ...] [--jobs N]

A mutant that lives is a promise without a test. Needs no GPU: kernels run in the emulator.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from tests.mutants.mutant import ROOT, Mutant, read_mutants

# Of one mutant's tests; a mutant that hangs is killed too.
_SECONDS = 300

_COPIED = ("mlagen", "templates", "cache_tools", "tests", "docs", "examples", "pyproject.toml")


def main() -> int:
    """Run the named mutants, or all, and return 1 if one lives."""
    parser = argparse.ArgumentParser(prog="python3 -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in read_mutants()}
    for name in arguments.names:
        if name not in known:
            parser.error(f"NAME: expected one of {', '.join(known)}, got {name}")
    chosen = [known[name] for name in arguments.names or known]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        pool = ThreadPoolExecutor(arguments.jobs)
        broken = require_passing(chosen, Path(folder))
        if broken:
            click.echo(f"the tests fail without a mutant:\n{broken}", err=True)
            return 2
        alive = []
        verdicts = pool.map(lambda mutant: is_killed(mutant, Path(folder)), chosen)
        for mutant, killed in zip(chosen, verdicts, strict=True):
            click.echo(f"{'killed' if killed else 'LIVES '}  {mutant.name}: {mutant.why}")
            if not killed:
                alive.append(mutant.name)
    click.echo(f"{len(chosen)} mutants: {len(chosen) - len(alive)} killed, {len(alive)} live")
    return 1 if alive else 0


def require_passing(mutants: list[Mutant], folder: Path) -> str:
    """Return the output of the mutants' tests if they fail in an unchanged copy, else nothing."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    root = copy_of_checkout(folder / "unchanged")
    done = run_tests(root, tests, seconds=_SECONDS * len(mutants))
    return "" if done == 0 else f"exit code {done}: {' '.join(tests)}"


def is_killed(mutant: Mutant, folder: Path) -> bool:
    """Whether each named test fails alone in a copy with the mutant."""
    root = copy_of_checkout(folder / mutant.name)
    path = root / mutant.file
    path.write_text(mutant.applied(path.read_text(encoding="utf-8")), encoding="utf-8")
    try:
        return all(run_tests(root, [test]) == 1 for test in mutant.tests)
    finally:
        shutil.rmtree(root)


def copy_of_checkout(root: Path) -> Path:
    """Copy what tests need into ``root``."""
    root.mkdir()
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=ignored)
        else:
            shutil.copy2(source, root / name)
    return root


def run_tests(root: Path, tests: list[str], *, seconds: int = _SECONDS) -> int:
    """Return pytest's exit code, and 1, that of a failed test, if the tests hang or crash."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        code = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return 1
    return 1 if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())
