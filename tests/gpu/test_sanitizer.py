"""Every template under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SANITIZER = shutil.which("compute-sanitizer")

# One case of each tile and of the combining kernel, in pages of one token and of many, ragged.
_SMALL_CASES = """
import torch
import mlagen
from tests.cases import MlaCase
fp16 = torch.float16
for case in (
    MlaCase(name="16 rows", seq_lens=(0, 5, 70), heads=16, page_size=16),
    MlaCase(name="32 rows", seq_lens=(65, 130), heads=20, with_sinks=True),
    MlaCase(name="64 rows", seq_lens=(70, 200, 3), heads=40, q_len=2),
    MlaCase(name="split", seq_lens=(700, 30), heads=64),
    MlaCase(name="rank 256", seq_lens=(700, 30), heads=64, kv_lora_rank=256, page_size=1),
    MlaCase(name="ragged", seq_lens=(70, 9), q_lens=(3, 0), cache_form="strided", dtype=fp16),
):
    problem = case.build("cuda")
    out, lse = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        **problem.arguments(return_lse=True)
    )
    problem.check(out, lse)
    print("right:", case.name)
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.skipif(_SANITIZER is None, reason="compute-sanitizer is not installed")
def test_small_cases_are_clean(tool: str) -> None:
    """The sanitizer finds no bad access and no race in a small case of each template."""
    # The bindings probe for driver functions that this driver does not have; that is no error.
    command = [
        str(_SANITIZER),
        "--tool",
        tool,
        "--report-api-errors",
        "no",
        "--error-exitcode",
        "9",
    ]
    root = str(Path(__file__).resolve().parents[2])

    done = subprocess.run(
        [*command, sys.executable, "-c", _SMALL_CASES],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=root,
        env=os.environ | {"PYTHONPATH": root},
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("right:") == 6
    assert "0 errors" in done.stdout
