"""`mlagen bench` on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--batch 2 --seq-len 500 --heads 16 --json"


@pytest.mark.parametrize(
    ("options", "families"),
    [
        ("--family mla,gqa", ["mla", "gqa"]),
        ("--kv-dtype fp8_dsv4 --top-k 0,100 --q-len 2", ["mla", "mla"]),
        ("--family gqa --top-k 128 --sparse-block 1,128 --page-size 128 --q-len 2", ["gqa", "gqa"]),
    ],
)
def test_two_small_cases_are_measured(options: str, families: list[str]) -> None:
    """Times, errors and ceilings are reported and plausible."""
    command = [sys.executable, "-m", "cache_tools", "bench", *options.split(), *SMALL.split()]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    ceilings = document["ceilings"]
    assert ceilings["read_gb_s"] > 50
    assert ceilings["bf16_tflop_s"] > 1
    assert ceilings["fp8_tflop_s"] is None
    assert [case["family"] for case in document["cases"]] == families
    for case in document["cases"]:
        outcome = case["mlagen"]
        assert 0 < outcome["error"] <= case["error_bound"]
        assert 1 < outcome["us"] < 10_000
        assert 0 < outcome["roofline_share"] < 1
        assert case["input_sets"] > 1
