"""Sinks at the limits of float32, and rows that see nothing, in the kernels for Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mlagen.api.mla_call import run_mla
from mlagen.settings import current_settings
from tests.gqa_problems import GqaCase
from tests.gqa_semantics import decode
from tests.hopper_tiles import taking_hopper_kernels
from tests.mla_cases import KINDS, of_kind
from tests.sink_values import extreme_sinks

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

# Whole requests, pieces of one, and none of it.
LENGTHS = {"whole": (70, 1, 0), "pieces": (9000, 0)}


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every call of this file take a sm90 kernel."""
    monkeypatch.setenv("MLAGEN_GQA_KERNEL", "sm90")
    current_settings.cache_clear()
    with taking_hopper_kernels(monkeypatch):
        yield


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("q_len", [1, 4], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "bf16 over fp8_ds_mla", "fp8_per_token"])
def test_mla(kind: str, q_len: int, lengths: tuple[int, ...]) -> None:
    """Output and LSE are float64's, in both bases."""
    case = of_kind(KINDS[kind], name="", seq_lens=lengths, heads=16, q_len=q_len)
    problem = replace(case.build("cuda"), sinks=extreme_sinks("cuda"))

    for base in ("base2", "basee"):
        inputs = problem.inputs(return_lse=True, return_lse_base=base)
        out, lse = run_mla(inputs, enable_pdl=True)

        problem.check(out, lse, natural=base == "basee")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
def test_grouped_query(kv: str, lengths: tuple[int, ...]) -> None:
    """The output is float64's."""
    problem = GqaCase(name="", seq_lens=lengths, group=8, page_size=64, kv=kv).build("cuda")
    problem = replace(problem, sinks=extreme_sinks("cuda"))

    problem.check(decode(problem))
