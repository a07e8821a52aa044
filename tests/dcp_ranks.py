"""Processes that each are a rank of decode context parallel, and check their results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from mlagen.distributed import decode_cp, local_seq_lens
from tests.problems.mla import MlaCase, MlaProblem
from tests.problems.reference import (
    UNIT_ROUNDOFF,
    Attention,
    assert_close,
    lse_tolerance,
    output_tolerance,
)


def check_ranks(world: int, backend: str, folder: Path, cases: tuple[MlaCase, ...]) -> None:
    """Fail unless every rank computes its heads of every case, in a process for each rank."""
    where = f"file://{folder / 'rendezvous'}"
    spawn(_check_rank, (world, backend, where, cases), nprocs=world)  # type: ignore[no-untyped-call]


def _check_rank(
    rank: int, world: int, backend: str, where: str, cases: tuple[MlaCase, ...]
) -> None:
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world)
    try:
        for case in cases:
            whole = case.build(device)
            own = replace(case, cp_world=world, cp_rank=rank).build(device)
            out, lse = decode_rank(own, return_lse=True)
            _check_heads(whole, _heads_of(own), out, lse)
    finally:
        dist.destroy_process_group()


def _heads_of(problem: MlaProblem) -> slice:
    """Return the heads of a rank of as many."""
    each = problem.case.heads // problem.case.cp_world
    return slice(problem.case.cp_rank * each, (problem.case.cp_rank + 1) * each)


def decode_rank(problem: MlaProblem, **changes: Any) -> Any:
    """Return what ``decode_cp`` returns for the heads of a rank."""
    case, heads = problem.case, _heads_of(problem)
    arguments = problem.arguments()
    for name in ("enable_dcp", "cp_world", "cp_rank", "return_lse", "return_lse_base"):
        del arguments[name]
    assert torch.equal(
        problem.seq_lens,
        local_seq_lens(arguments["causal_seqlens_kv_global"], case.cp_world, case.cp_rank),
    )
    arguments["query"] = arguments["query"][..., heads, :]
    if problem.sinks is not None:
        arguments["sinks"] = problem.sinks[heads]
    return decode_cp(**arguments | changes)


def _check_heads(whole: MlaProblem, heads: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fail unless the results of some heads are those of all tokens, merged from parts."""
    all_heads = whole.expected()
    expected = Attention(**{name: value[:, heads] for name, value in vars(all_heads).items()})
    tolerance = output_tolerance(out.dtype, expected, whole.math_dtype)
    tolerance += UNIT_ROUNDOFF[out.dtype] * expected.magnitude
    assert_close(out.float().reshape(expected.out.shape), expected.out, tolerance, "out")
    wanted = expected.lse.float()
    assert_close(
        lse.reshape(wanted.shape), wanted, lse_tolerance(whole.math_dtype, expected), "lse"
    )
