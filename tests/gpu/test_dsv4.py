"""Sparse MLA over two pools on a GPU, by the sm80 kernel and, where it covers a call, by sm90's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from mlagen.errors import UnsupportedError
from mlagen.runtime.device import arch_of_device
from mlagen.spec.mla.sm90 import mla_sm90_kernel
from tests.graph_replay import check_replays
from tests.problems.dsv4 import DSV4, Dsv4Case, decode_dsv4
from tests.problems.dsv4_cases import CASES, LONG_CASES, case
from tests.sm90_tiles import choose_kernel, needs_sm90, smaller_tiles
from tests.test_dsv4 import TestDsv4

__all__ = ["TestDsv4"]

# Lengths of both lists, from replay to replay.
ROUNDS = (
    ((128, 0, 7, 64), (512, 65, 0, 1)),
    ((1, 128, -2, 0), (0, 512, 700, 64)),
    ((65, 2, 300, 128), (64, 0, 1, 511)),
)


@pytest.fixture(params=["sm80", pytest.param("sm90", marks=needs_sm90)], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Make every call use a kind of kernel, sm90's with its default tile."""
    choose_kernel(monkeypatch, request.param)
    with smaller_tiles(monkeypatch, enabled=False):
        yield request.param


def _is_covered(kernel: str, case: Dsv4Case) -> bool:
    """Whether the kernel has the formats of a case."""
    sm90 = mla_sm90_kernel(arch_of_device(0), case.variant, case.heads, "auto")
    return kernel == "sm80" or sm90 is not None


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES], ids=str)
def test_edge_cases(case: Dsv4Case, kernel: str) -> None:
    """Every case gives the float64 result; a format that sm90 kernels lack is refused."""
    problem = case.build("cuda")
    if _is_covered(kernel, case):
        problem.check(*decode_dsv4(problem))
    else:
        with pytest.raises(UnsupportedError, match="no such kernel"):
            decode_dsv4(problem)


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("q_len", [0, 2])
def test_replays(heads: int, q_len: int) -> None:
    """A captured call follows lengths, entries, pools, queries and sinks."""
    usual = case("", heads=heads, q_len=q_len, extra_top_k=512, sinks="random")
    problems = [
        replace(usual, seq_lens=lens, extra_lens=extra_lens, seed=seed).build("cuda")
        for seed, (lens, extra_lens) in enumerate(ROUNDS)
    ]

    check_replays(DSV4, problems)


def test_layers_with_the_same_lengths() -> None:
    """Calls with other entries and pools are right, and with other lengths of the same sums."""
    facts = case("", seq_lens=(128, 3, 90, 0), extra_lens=(512, 0, 65, 1), extra_top_k=512)
    problems = [replace(facts, seed=seed).build("cuda") for seed in range(3)]
    others = replace(facts, seq_lens=(128, 0, 0, 1), extra_lens=(512, 3, 155, 0)).build("cuda")
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for problem in (*problems, others, *problems):
        out, lse = decode_dsv4(problem, workspace_buffer=workspace)

        problem.check(out, lse)
