"""Block-sparse and token-sparse grouped-query decode on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.graph_replay import captured, exchange
from tests.problems.sparse_gqa import SparseCase, decode_sparse
from tests.problems.sparse_gqa_cases import CASES, msa, qsa
from tests.sm90_tiles import choose_kernel, needs_sm90
from tests.test_sparse_gqa import FUNCTIONS, TestSparseGqa

__all__ = ["TestSparseGqa"]

LONG_CASES = [
    msa("many requests", seq_lens=tuple(1500 + i * 37 for i in range(40)), num_indices=16),
    msa("a long sequence", seq_lens=(20_000,), num_indices=64, group=16, kv="e4m3"),
    qsa("many tokens", seq_lens=(3000, 70), requests=(0, 1) * 40, num_indices=500, gate=True),
]


@pytest.fixture(params=["sm80", pytest.param("auto", marks=needs_sm90)], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make every call use the sm80 kernel, or sm90's where it covers the call."""
    choose_kernel(monkeypatch, request.param)
    return str(request.param)


@pytest.mark.parametrize("case", [*CASES, *LONG_CASES], ids=str)
def test_edge_cases(case: SparseCase) -> None:
    """Every case gives the float64 result, and what no index names has no effect."""
    problem = case.build("cuda")

    for _ in range(2):  # planned, and by the cached launcher
        problem.check(*decode_sparse(problem), natural=True)


@pytest.mark.parametrize(
    "cases",
    [
        [msa("", seq_lens=lens, q_len=2) for lens in ((900, 130, 0), (2, 899, 257), (0, 0, 640))],
        [
            qsa("", seq_lens=(900, 130), requests=requests, gate=True, counts=counts)
            for requests, counts in (
                ((0, 1, 0, 1), (40, 3, 0, 20)),
                ((1, 1, 1, 1), (1, 2, 3, 50)),
                ((0, -1, 5, 0), (40, 40, 40, 0)),
            )
        ],
    ],
    ids=["msa", "qsa"],
)
def test_replays(cases: list[SparseCase]) -> None:
    """A captured call follows lengths, indices, requests, tables, caches and queries."""
    problems = [replace(case, seed=seed).build("cuda") for seed, case in enumerate(cases)]
    pages = max(len(problem.store.key) for problem in problems)
    flag = "return_softmax_lse" if cases[0].kind == "msa" else "return_lse"
    base = {} if cases[0].kind == "msa" else {"return_lse_base": "basee"}
    given = [problem.arguments() for problem in problems]
    for each in given:  # of equal shapes
        each.update(
            {name: _padded(value, pages) for name, value in each.items() if _is_cache(name)}
        )
        table = "page_table" if cases[0].kind == "msa" else "block_table"
        each[table] = torch.nn.functional.pad(each[table], (0, 64 - each[table].shape[1]), value=-1)
    static: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in given[0].items()
    }
    out = static["out"] = torch.empty_like(static["q"])
    lse = static["lse"] = torch.empty(out.shape[:-1], device="cuda")
    graph = captured(FUNCTIONS[cases[0].kind], static | base | {flag: True})

    for problem, each in zip((*problems[1:], problems[0]), (*given[1:], given[0]), strict=True):
        exchange(static, each)
        out.fill_(7.0)
        lse.fill_(7.0)
        graph.replay()
        problem.check(out, lse, natural=True)


def _is_cache(name: str) -> bool:
    return name in {"k", "v", "k_cache", "v_cache"}


def _padded(cache: torch.Tensor, pages: int) -> torch.Tensor:
    """Return a cache with more pages, of zeros."""
    wide = cache.new_zeros(pages, *cache.shape[1:])
    wide[: len(cache)] = cache
    return wide
