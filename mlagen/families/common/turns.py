"""Turns of a batch-invariant call: its requests in several launches, if the workspace is small.

The bits of a request's results do not depend on the other requests, so neither on the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mlagen.families.common.launchers import Launcher, SmallWorkspaceError, Tensors
from mlagen.runtime.launch import Launch
from mlagen.runtime.loader import LoadedKernel

# Arguments with a row for each request, or for each query token.
_ROWS = (
    *("query", "query_rope", "query_scales", "block_tables", "seq_lens", "top_k_lens", "bias"),
    *("mask", "causal_seqlens_kv_global", "extra_indices", "extra_top_k_lens", "out", "lse"),
)


class Turn(NamedTuple):
    """Requests from ``start`` up to ``end``, and their launcher."""

    start: int
    end: int
    launcher: Launcher


@dataclass(eq=False)
class TurnsLauncher:
    """The launchers of the turns of a call, as one."""

    problem: Any  # of the whole call
    turns: Sequence[Turn]

    @property
    def plan(self) -> Any:
        """The plan of the first turn."""
        return self.turns[0].launcher.plan

    @property
    def decode(self) -> LoadedKernel:
        """The kernel, besides that which combines its splits."""
        return self.turns[0].launcher.decode

    def inputs_of(self, args: Any) -> Tensors:
        """Return the tensors that the kernels read."""
        return self.turns[0].launcher.inputs_of(args)

    def fixed_of(self, args: Any) -> tuple[Any, ...]:
        """Return what the arguments of all calls of this launcher share, besides tensors."""
        return self.turns[0].launcher.fixed_of(args)

    def launch(
        self, args: Any, out: torch.Tensor, lse: torch.Tensor | None = None
    ) -> Sequence[Launch]:
        """Enqueue the kernels of one call, turn by turn."""
        launches: list[Launch] = []
        for start, end, launcher in self.turns:
            part = part_of(args, self.problem, start, end)
            part_out = rows_of(out, self.problem, start, end)
            part_lse = None if lse is None else rows_of(lse, self.problem, start, end)
            launches += launcher.launch(part, part_out, part_lse)
        return launches


def plan_turns(
    args: Any, problem: Any, error: SmallWorkspaceError, plan: Callable[[Any], Launcher]
) -> TurnsLauncher:
    """Return the launcher of a call whose workspace is too small for all of its requests.

    Raises
    ------
    SmallWorkspaceError
        If the workspace does not suffice for one request, or query lengths are on the device.
    """
    batch = problem.batch
    count = -(-error.needed // max(1, error.given))
    if problem.q_len == 0 or count > batch:
        raise error
    size = -(-batch // count)
    while size * error.needed > error.given * batch and size > 1:
        size -= 1
    launchers: dict[int, Launcher] = {}
    turns = []
    for start in range(0, batch, size):
        end = min(start + size, batch)
        if end - start not in launchers:
            launchers[end - start] = plan(part_of(args, problem, start, end))
        turns.append(Turn(start, end, launchers[end - start]))
    return TurnsLauncher(problem, turns)


def part_of(args: Any, problem: Any, start: int, end: int) -> Any:
    """Return the arguments of some requests of a call with as many query tokens of each."""
    given = {name: getattr(args, name) for name in args._fields if name in _ROWS}
    parts = {
        name: rows_of(tensor, problem, start, end)
        for name, tensor in given.items()
        if tensor is not None
    }
    if args.kv_indptr is not None:  # page ids are flat
        parts |= {"block_tables": args.block_tables, "kv_indptr": args.kv_indptr[start : end + 1]}
    return args._replace(**parts)


def rows_of(tensor: torch.Tensor, problem: Any, start: int, end: int) -> torch.Tensor:
    """Return the rows of some requests, of a tensor with rows of requests or query tokens."""
    rows = tensor.shape[0] // problem.batch
    return tensor[start * rows : end * rows]
