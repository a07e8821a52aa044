"""The programs of `examples/` run on the CPU, and find their own results right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
MAX_LINES = 90
TIME_LIMIT_S = 100
NEEDED = {
    "transformers_llama.py": ["transformers>=5.17"],
    "transformers_deepseek.py": ["transformers>=5.17"],
    "transformers_continuous.py": ["transformers>=5.17,<5.18"],
}
NEEDED_ON_CPU = {"transformers_continuous.py": ["psutil"]}


def is_installed(needed: str) -> bool:
    """Return whether a requirement is met."""
    requirement = Requirement(needed)
    try:
        return requirement.specifier.contains(metadata.version(requirement.name))
    except metadata.PackageNotFoundError:
        return False


def run_example(
    name: str, cache: Path, *, hide_gpus: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own, where a warning is an error."""
    on_cpu = NEEDED_ON_CPU.get(name, []) if hide_gpus else []
    for needed in NEEDED.get(name, []) + on_cpu:
        if not is_installed(needed):
            pytest.skip(f"examples/{name} needs {needed}")
    path = os.pathsep.join([str(ROOT), *sys.path])
    environ = {**os.environ, "PYTHONPATH": path, "MLAGEN_CACHE_DIR": str(cache)}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if hide_gpus else {}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name)]
    return run_program(command, cwd=cache.parent, env=environ, timeout=TIME_LIMIT_S)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_the_cpu(name: str, cache_dir: Path) -> None:
    """An example without a GPU ends with code 0, which says that its result is right."""
    ran = run_example(name, cache_dir)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout


def test_a_wrong_result_is_noticed(cache_dir: Path, tmp_path: Path) -> None:
    """An example exits with 1 if the call computes something else."""
    source = (ROOT / "examples" / "first_call.py").read_text(encoding="utf-8")
    changed = source.replace("bmm1_scale=SOFTMAX_SCALE", "bmm1_scale=1.1 * SOFTMAX_SCALE")
    (tmp_path / "wrong.py").write_text(changed, encoding="utf-8")
    ran = run_example(str(tmp_path / "wrong.py"), cache_dir)
    assert changed != source
    assert (ran.returncode, ran.stderr) == (1, "")


def test_an_example_is_short_and_says_what_it_is() -> None:
    """It has one screen or two, says how to run it and what it prints, and is in the README."""
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[`(\w+\.py)`\]\(\1\)", readme, re.MULTILINE)) == EXAMPLES
    for name in EXAMPLES:
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        docstring = text.split('"""')[1]
        assert len(text.splitlines()) <= MAX_LINES, name
        assert f"\nRun it:     python3 examples/{name}\n" in docstring
        assert all(f"\n{label}:" in docstring for label in ("Prints", "Exits with")), name
