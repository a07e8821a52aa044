"""Sinks at the limits of float32, and fully masked rows, in the sm90 kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mlagen.families.mla.dispatch import run_mla
from mlagen.settings import current_settings
from tests.problems.entry_points import decode_gqa as decode
from tests.problems.gqa import GqaCase
from tests.problems.mla import mla_case
from tests.sink_values import extreme_sinks
from tests.sm90_tiles import sm90_kernels

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)

# Whole sequences, splits of one, and an empty one.
LENGTHS = {"whole": (70, 1, 0), "splits": (9000, 0)}


@pytest.fixture(autouse=True)
def _sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every call of this file use an sm90 kernel."""
    monkeypatch.setenv("MLAGEN_GQA_KERNEL", "sm90")
    current_settings.cache_clear()
    with sm90_kernels(monkeypatch):
        yield


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("q_len", [1, 4], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "bf16 over fp8_ds_mla", "fp8_per_token"])
def test_mla(kind: str, q_len: int, lengths: tuple[int, ...]) -> None:
    """Output and LSE match float64, in both bases."""
    case = mla_case(kind, name="", seq_lens=lengths, heads=16, q_len=q_len)
    problem = replace(case.build("cuda"), sinks=extreme_sinks("cuda"))

    for base in ("base2", "basee"):
        inputs = problem.inputs(return_lse=True, return_lse_base=base)
        out, lse = run_mla(inputs, enable_pdl=True)

        problem.check(out, lse, natural=base == "basee")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
def test_gqa(kv: str, lengths: tuple[int, ...]) -> None:
    """The output matches float64."""
    problem = GqaCase(name="", seq_lens=lengths, group=8, page_size=64, kv=kv).build("cuda")
    problem = replace(problem, sinks=extreme_sinks("cuda"))

    problem.check(decode(problem))
