"""Every kernel family under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_CLEAN = {
    "memcheck": " ERROR SUMMARY: 0 errors",
    "racecheck": " RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
_SANITIZER = shutil.which("compute-sanitizer")

# Cases of each tile, each KV lookup and the combine kernel, with pages of one token and of many,
# ragged.
_MLA_CASES = """
import torch
from mlagen.families.mla import plan
from tests.problems.mla import MlaCase
from tests.problems.entry_points import compute
plan.is_small_call = lambda *_: False
plan.choose_block_m = lambda spec, *_: spec.block_m
fp16, e4m3 = torch.float16, torch.float8_e4m3fn
for case in (
    MlaCase(name="16 rows", seq_lens=(0, 5, 70), heads=16, page_size=16),
    MlaCase(name="32 rows", seq_lens=(65, 130), heads=20, with_sinks=True),
    MlaCase(name="64 rows", seq_lens=(70, 200, 3), heads=40, q_len=2),
    MlaCase(name="split", seq_lens=(700, 30), heads=64),
    MlaCase(name="rank 256", seq_lens=(700, 30), heads=64, kv_lora_rank=256, page_size=1),
    MlaCase(name="ragged", seq_lens=(70, 9), q_lens=(3, 0), cache_layout="strided", dtype=fp16),
    MlaCase(name="e4m3", seq_lens=(70, 9), heads=64, dtype=e4m3),
    MlaCase(name="e4m3 of 16 rows", seq_lens=(70, 900), heads=16, dtype=e4m3, page_size=16),
    MlaCase(name="e4m3 under bf16", seq_lens=(170, 9), kv_format="e4m3", scales="for 128 elements"),
    MlaCase(name="sparse of 16 rows", seq_lens=(170, 9), heads=16, top_k=140),
    MlaCase(name="sparse of 64 rows", seq_lens=(70, 9), heads=64, top_k=40, page_size=3),
    MlaCase(name="fp8_ds_mla", seq_lens=(70, 9), heads=32, kv_format="fp8_ds_mla", top_k=40),
    MlaCase(name="fp8_ds_mla, 64 rows", seq_lens=(70, 9), heads=64, kv_format="fp8_ds_mla"),
    MlaCase(name="sparse under e4m3", seq_lens=(70, 9), heads=64, dtype=e4m3, top_k=40),
    MlaCase(name="fp8_per_token", seq_lens=(70, 9), heads=20, kv_format="fp8_per_token"),
    MlaCase(name="many splits", seq_lens=(4300,), heads=9),
    MlaCase(name="no rope", seq_lens=(700, 30), heads=64, qk_rope_head_dim=0),
    MlaCase(name="no rope, 16 rows", seq_lens=(70, 900), heads=16, qk_rope_head_dim=0),
    MlaCase(name="no rope, e4m3", seq_lens=(70, 9), heads=64, dtype=e4m3, qk_rope_head_dim=0),
    MlaCase(name="biased", seq_lens=(70, 9), kv_format="fp8_per_token", bias="for each head"),
    MlaCase(name="separate values", seq_lens=(70, 9), heads=32, values="other pages"),
):
    problem = case.build("cuda")
    problem.check(*compute(problem))
    print("right:", case.name)
"""

_TWO_POOL_CASES = """
from mlagen.families.mla import plan
from tests.problems.dsv4 import Dsv4Case, decode_dsv4
from tests.problems.dsv4_rows import Pages
plan.is_small_call = lambda *_: False
plan.choose_block_m = lambda spec, *_: spec.block_m
cut = Pages(page_size=2, count=40, is_cut=True)
facts = {"seq_lens": (100, 0, 7), "extra_lens": (3, 300, 0), "extra_top_k": 300, "extra": cut}
for case in (
    Dsv4Case(name="16 rows", heads=9, sinks="random", **facts),
    Dsv4Case(name="32 rows", heads=32, q_len=3, **facts),
    Dsv4Case(name="64 rows", heads=64, swa=cut, **facts),
    Dsv4Case(name="one list", heads=16, seq_lens=(128, 70), swa=cut),
    Dsv4Case(name="split", heads=8, seq_lens=(128,), extra_lens=(4000,), extra_top_k=4096),
    Dsv4Case(name="528 bytes", kv_cache_format="fp8_dsv41", **facts),
):
    problem = case.build("cuda")
    problem.check(*decode_dsv4(problem))
    print("right:", case.name)
"""

_GQA_CASES = """
import torch
from tests.problems.entry_points import decode_gqa_with_lse, trtllm_gqa_with_lse
from tests.problems.problem import E4M3
from tests.problems.gqa import GqaCase
for case in (
    GqaCase(name="16 rows", seq_lens=(0, 5, 70)),
    GqaCase(name="32 rows", seq_lens=(65, 130), group=8, q_len=3, mask="random", sink=3.0),
    GqaCase(name="split", seq_lens=(900, 30), group=1, window=700),
    GqaCase(
        name="ragged", seq_lens=(70, 9, 4), q_lens=(3, 0, 2), page_size=1, cache_layout="strided"
    ),
    GqaCase(name="e4m3", seq_lens=(70, 9), kv="e4m3", out_dtype=E4M3, o_scale=0.5),
    GqaCase(name="int8", seq_lens=(700, 9), kv="int8", dtype=torch.float16, head_dim=48),
    GqaCase(name="nvfp4", seq_lens=(70, 9), kv="nvfp4", head_dim=80, layout="HND"),
    GqaCase(name="nvfp4 by TMA", seq_lens=(300, 9), kv="nvfp4", window=100, page_size=32),
    GqaCase(name="512 wide", seq_lens=(300, 9), head_dim=512),
    GqaCase(name="values of 128 dims", seq_lens=(300, 9), head_dim=192, head_dim_vo=128),
    GqaCase(name="capped", seq_lens=(300, 9), q_len=2, soft_cap=30.0, score_scale=1.0),
    GqaCase(name="rank", seq_lens=(300, 9), q_len=2, cp_world=2, cp_rank=1, committed=(597, 3)),
    GqaCase(name="two tables", seq_lens=(300, 9), has_value_tables=True, page_size=64),
):
    problem = case.build("cuda")
    of_servers = case.cp_world or case.has_value_tables
    call = trtllm_gqa_with_lse if of_servers else decode_gqa_with_lse
    problem.check(*call(problem))
    print("right:", case.name)
"""

_SPARSE_CASES = """
from tests.problems.head_tables import HEAD_TABLES_CASES, check_head_tables
from tests.problems.sparse_gqa import decode_sparse
from tests.problems.sparse_gqa_cases import msa, qsa
from tests.problems.top_k import TOP_K_CASES, check_top_k
for case in (
    msa(name="16 rows", seq_lens=(500, 130, 0), q_len=2, is_packed=True),
    msa(name="32 rows", seq_lens=(500, 130), group=20, kv="e4m3"),
    msa(name="wild", seq_lens=(500, 130), indices="invalid"),
    qsa(name="gated", seq_lens=(300, 70), requests=(1, -1, 0), gate=True),
    qsa(name="nvfp4", seq_lens=(300, 70), requests=(1, 0), kv="nvfp4"),
):
    problem = case.build("cuda")
    problem.check(*decode_sparse(problem), natural=True)
    print("right:", case.name)
check_head_tables(HEAD_TABLES_CASES[1], "cuda")
check_top_k(TOP_K_CASES[3], "cuda")
"""

_WRITER_CASES = """
import torch
from tests.writers.numpy_prologue import NOTHING
from tests.writers.test_writers import Filled, prologues_of, tokens_of
for case in (
    dict(name="584"),
    dict(name="528 inline"),
    dict(name="288"),
    dict(name="656"),
    dict(name="640"),
):
    tokens = tokens_of(case["name"], 20, torch.float16)
    for prologue in (NOTHING, *prologues_of(case["name"], 20, torch.float16)):
        pool = Filled(case["name"], "cuda")
        pool.append(tokens, [*range(14), 3, -1, 1 << 40, 14, 0, 2], prologue=prologue)
        pool.check()
    print("right:", case["name"])
"""
_CASES = {
    "mla": _MLA_CASES,
    "two pools": _TWO_POOL_CASES,
    "gqa": _GQA_CASES,
    "sparse gqa": _SPARSE_CASES,
    "writers": _WRITER_CASES,
}


@pytest.mark.parametrize("cases", _CASES.values(), ids=_CASES)
# racecheck does not support mbarriers with TMA transaction counts; random delays check the sm90
# kernels for races, in test_mla_sm90.py and its siblings.
@pytest.mark.parametrize(
    ("tool", "kernel"), [("memcheck", "auto"), ("memcheck", "sm80"), ("racecheck", "sm80")]
)
@pytest.mark.skipif(_SANITIZER is None, reason="compute-sanitizer is not installed")
def test_small_cases_are_clean(tool: str, kernel: str, cases: str) -> None:
    """The sanitizer reports no invalid access and no race in a small case of each kernel."""
    # The bindings probe for driver functions that this driver lacks; that is no error.
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
        [*command, sys.executable, "-c", cases],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=root,
        env=os.environ
        | {"PYTHONPATH": root, "MLAGEN_MLA_KERNEL": kernel, "MLAGEN_GQA_KERNEL": kernel},
        check=False,
    )

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("right:") == cases.count('name="')
    assert _CLEAN[tool] in done.stdout
