"""The programs of `examples/` run on a GPU, and find their own results right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_examples import EXAMPLES, run_example


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_on_a_gpu(name: str, session_cache_dir: Path) -> None:
    """An example ends with code 0, which says that its result is right."""
    ran = run_example(name, session_cache_dir, hide_gpus=False)

    assert ran.returncode == 0, ran.stdout + ran.stderr
