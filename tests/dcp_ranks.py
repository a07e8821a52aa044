"""Processes that each are a rank of decode context parallel, and check their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from mlagen.distributed import decode_cp, local_seq_lens
from tests.graph_replay import captured, exchange
from tests.problems.mla import MlaCase, MlaProblem
from tests.problems.reference import (
    UNIT_ROUNDOFF,
    Attention,
    assert_close,
    lse_tolerance,
    output_tolerance,
)
from tests.programs import METHOD, preload_torch
from tests.rejected import rejects

Check = Callable[[MlaCase, str, int, int], None]


def run_ranks(
    check: Check, world: int, backend: str, folder: Path, cases: tuple[MlaCase, ...]
) -> None:
    """Run a check of every case, given case, device, world and rank, in a process for each rank."""
    where = f"file://{folder / 'rendezvous'}"
    preload_torch()
    given = (check, world, backend, where, cases)
    start_processes(_run_rank, given, nprocs=world, start_method=METHOD)  # type: ignore[no-untyped-call]


def _run_rank(
    rank: int, check: Check, world: int, backend: str, where: str, cases: tuple[MlaCase, ...]
) -> None:
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world)
    try:
        for case in cases:
            check(case, device, world, rank)
    finally:
        dist.destroy_process_group()


def check_heads(case: MlaCase, device: str, world: int, rank: int) -> None:
    """Fail unless a rank computes its heads, from queries of its own heads and of all heads.

    A second call with tensors of the same shapes leaves the results of the first as they are.
    """
    problems = [replace(case, seed=seed, cp_world=world, cp_rank=rank) for seed in range(2)]
    own, other = (problem.build(device) for problem in problems)
    whole = case.build(device)

    results = decode_cp(**rank_arguments(own))
    decode_cp(**rank_arguments(other))
    of_all = decode_cp(**rank_arguments(own) | {"query": own.query, "query_has_all_heads": True})

    _check(whole, own, results, of_all)


_ERROR_OF_ANOTHER = "group: expected results of every rank, got an error on ranks [1]"

# What one rank may get wrong, and the error; each is found before or in its decode.
WRONG: dict[str, dict[str, Any]] = {
    "kv_cache.dtype": {"kv_cache": torch.zeros(3, 64, 576)},
    "seq_lens": {"seq_lens": [1, 2]},
    "query.ndim": {"cum_seq_lens_q": torch.tensor([0, 1, 2], dtype=torch.int32)},
    "sinks.shape": {"sinks": torch.zeros(99)},
    "max_seq_len": {"max_seq_len": -1},
    "return_lse": {"return_lse": "no"},
    "return_lse_base": {"return_lse_base": "base3"},
    "causal_seqlens_kv_global": {"causal_seqlens_kv_global": None},
}


def check_errors(case: MlaCase, device: str, world: int, rank: int) -> None:
    """Fail unless all ranks learn of the error of one, and their next calls are right.

    They return NaN where reading a message would wait for a GPU.
    """
    own = replace(case, cp_world=world, cp_rank=rank).build(device)
    whole, valid = case.build(device), rank_arguments(own)
    of_all = {"query": own.query, "query_has_all_heads": True}
    for name, changes in WRONG.items():
        for others in ({}, of_all):
            wrong = {
                key: value.to(device) if isinstance(value, torch.Tensor) else value
                for key, value in changes.items()
            }
            given = valid | others | (wrong if rank == 1 else {})
            if rank != 1 and device != "cpu":
                out, lse = decode_cp(**given)
                assert out.isnan().all()
                assert lse.isnan().all()
            else:
                message = f"{name}..." if rank == 1 else _ERROR_OF_ANOTHER
                with rejects(message):
                    decode_cp(**given)
            _check(whole, own, decode_cp(**valid | others))


def check_replays(case: MlaCase, device: str, world: int, rank: int) -> None:
    """Fail unless replays of a captured call follow its tensors, and equal calls of their own."""
    count = len(case.seq_lens)
    cases = [
        replace(case, seed=turn, seq_lens=case.seq_lens[turn:] + case.seq_lens[:turn])
        for turn in range(count)
    ]
    ranks = [replace(one, cp_world=world, cp_rank=rank).build(device) for one in cases]
    static: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in rank_arguments(ranks[0]).items()
    }
    results: list[Any] = []
    graph = captured(lambda: results.append(decode_cp(**static)))
    out, lse = results[-1]

    for turn in (*range(1, count), 0):
        exchange(static, rank_arguments(ranks[turn]))
        graph.replay()

        _check(cases[turn].build(device), ranks[turn], (out, lse))
        eager, eager_lse = decode_cp(**static)
        assert torch.equal(out, eager)
        assert torch.equal(lse, eager_lse)


def rank_arguments(problem: MlaProblem) -> dict[str, Any]:
    """Return the arguments of ``decode_cp`` for the heads of a rank, with LSE."""
    case, heads = problem.case, _heads_of(problem)
    arguments = problem.arguments()
    for name in ("enable_dcp", "cp_world", "cp_rank"):
        del arguments[name]
    assert torch.equal(
        problem.seq_lens,
        local_seq_lens(arguments["causal_seqlens_kv_global"], case.cp_world, case.cp_rank),
    )
    arguments["query"] = arguments["query"][..., heads, :]
    if problem.sinks is not None:
        arguments["sinks"] = problem.sinks[heads]
    return arguments


def _heads_of(problem: MlaProblem) -> slice:
    """Return the heads of a rank of as many."""
    each = problem.case.heads // problem.case.cp_world
    return slice(problem.case.cp_rank * each, (problem.case.cp_rank + 1) * each)


def _check(whole: MlaProblem, own: MlaProblem, *results: Any) -> None:
    """Fail unless the results of a rank's heads are those of all tokens, merged from parts."""
    all_heads, heads = whole.expected(), _heads_of(own)
    expected = Attention(**{name: value[:, heads] for name, value in vars(all_heads).items()})
    wanted = expected.lse.float()
    for out, lse in results:
        tolerance = output_tolerance(out.dtype, expected, whole.math_dtype)
        tolerance += UNIT_ROUNDOFF[out.dtype] * expected.magnitude
        assert_close(out.float().reshape(expected.out.shape), expected.out, tolerance, "out")
        lse_bound = lse_tolerance(whole.math_dtype, expected)
        assert_close(lse.reshape(wanted.shape), wanted, lse_bound, "lse")
