"""The programs of `examples/` run on the CPU, and find their own results right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
MAX_LINES = 90
TIME_LIMIT_S = 100
NEEDED = {"transformers_decode.py": "transformers"}


def run_example(name: str, cache: Path, *, hide_gpus: bool) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own, where a warning is an error."""
    needed = NEEDED.get(name)
    if needed is not None and find_spec(needed) is None:
        pytest.skip(f"examples/{name} needs {needed}: pip install 'mlagen[test]'")
    path = os.pathsep.join([str(ROOT), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "MLAGEN_CACHE_DIR": str(cache)}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if hide_gpus else {}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name)]
    return subprocess.run(
        command,
        cwd=cache.parent,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT_S,
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_the_cpu(name: str, cache_dir: Path) -> None:
    """An example without a GPU ends with code 0, which says that its result is right."""
    ran = run_example(name, cache_dir, hide_gpus=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout


def test_a_wrong_result_is_noticed(cache_dir: Path, tmp_path: Path) -> None:
    """An example exits with 1 if the call computes something else."""
    source = (ROOT / "examples" / "first_call.py").read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.py"
    changed = source.replace("bmm1_scale=SOFTMAX_SCALE", "bmm1_scale=1.1 * SOFTMAX_SCALE")
    wrong.write_text(changed, encoding="utf-8")

    ran = run_example(str(wrong), cache_dir, hide_gpus=True)

    assert changed != source
    assert (ran.returncode, ran.stderr) == (1, "")


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_what_it_is(name: str) -> None:
    """An example has one screen or two, and says how to run it and what it prints."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    docstring = text.split('"""')[1]

    assert len(text.splitlines()) <= MAX_LINES
    assert f"\nRun it:     python3 examples/{name}\n" in docstring
    assert all(f"\n{label}:" in docstring for label in ("Prints", "Exits with"))


def test_the_table_names_every_example() -> None:
    """Each file of the folder has a row in its README."""
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")

    assert sorted(re.findall(r"^\| \[`(\w+\.py)`\]\(\1\)", table, re.MULTILINE)) == EXAMPLES
