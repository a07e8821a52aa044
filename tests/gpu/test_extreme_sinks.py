"""Sinks at the limits of float32, and fully masked rows, in the sm90 kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlagen.families.mla.dispatch import run_mla
from tests.problems.entry_points import decode_gqa as decode
from tests.problems.gqa import GqaCase
from tests.problems.mla import mla_case
from tests.sink_values import extreme_sinks
from tests.sm90_tiles import needs_sm90

pytestmark = [needs_sm90, pytest.mark.usefixtures("sm90")]

# Whole sequences, splits of one, and an empty one.
LENGTHS = {"whole": (70, 1, 0), "splits": (9000, 0)}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("q_len", [1, 4], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "bf16 over fp8_ds_mla", "fp8_per_token"])
def test_mla(kind: str, q_len: int, lengths: tuple[int, ...]) -> None:
    """Output and LSE match float64, in both bases."""
    case = mla_case(kind, seq_lens=lengths, heads=16, q_len=q_len)
    problem = replace(case.build("cuda"), sinks=extreme_sinks("cuda"))

    for base in ("base2", "basee"):
        inputs = problem.inputs(return_lse=True, return_lse_base=base)
        out, lse = run_mla(inputs, enable_pdl=True)

        problem.check(out, lse, natural=base == "basee")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
def test_gqa(kv: str, lengths: tuple[int, ...]) -> None:
    """The output matches float64."""
    problem = GqaCase(seq_lens=lengths, group=8, page_size=64, kv=kv).build("cuda")
    problem = replace(problem, sinks=extreme_sinks("cuda"))

    problem.check(decode(problem))
