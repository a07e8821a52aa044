"""Batches, their schedules, and the work that a schedule has to cover."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlagen.families.common.problem import ProblemShape
from mlagen.families.mla.plan import plan_mla_sm90
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.emulator.scheduled import Schedule, TileScheduler, WorkItem

# What no KV length of the tests exceeds.
MAX_TOKENS = 2**31 - 2**16
NO_WINDOW = 2**31 - 1


class Seq(NamedTuple):
    """A sequence: tokens in its KV cache, and query tokens."""

    kv_len: int
    q_len: int = 1


@dataclass(frozen=True)
class Batch:
    """What a schedule depends on."""

    seqs: tuple[Seq, ...]
    heads: int = 16  # per KV head
    num_cta_groups: int = 132
    cta_group_size: int = 1
    is_causal: bool = False
    window: int = NO_WINDOW  # GQA

    def is_ragged(self) -> bool:
        """Whether the sequences differ in their query tokens."""
        return len({seq.q_len for seq in self.seqs}) > 1


class Tile(NamedTuple):
    """An M tile of a sequence, of one KV head."""

    seq_idx: int
    kv_head: int
    first_row: int


def ints(values: Iterable[int]) -> ctypes.Array[ctypes.c_int]:
    """Return integers as a kernel reads them."""
    known = list(values)
    return (ctypes.c_int * len(known))(*known)


def schedule_of(
    scheduler: TileScheduler,
    batch: Batch,
    **changes: int | ctypes.Array[ctypes.c_int],
) -> Schedule:
    """Return the schedule of a batch; ``changes`` are to the parameters."""
    q_lens = [seq.q_len for seq in batch.seqs]
    ends = [sum(q_lens[:count]) for count in range(len(q_lens) + 1)]
    offsets = ints(ends)
    params: dict[str, int | ctypes.Array[ctypes.c_int]] = {
        "seq_lens": ints(seq.kv_len for seq in batch.seqs),
        "cu_seqlens_q": offsets if batch.is_ragged() else 0,
        "num_seqs": len(batch.seqs),
        "q_len": 0 if batch.is_ragged() else q_lens[0],
        "num_cta_groups": batch.num_cta_groups,
        "cta_group_size": batch.cta_group_size,
    }
    if isinstance(scheduler.spec, MlaSm90Spec):
        params |= {
            "heads": batch.heads,
            "total_rows": ends[-1] * batch.heads,
            "max_pages": MAX_TOKENS,
            "is_causal": batch.is_causal,
        }
    else:
        m_tiles = -(-q_lens[0] * batch.heads // scheduler.spec.block_m)
        num_tiles = 1 if batch.is_ragged() else m_tiles
        total_tiles = len(batch.seqs) * num_tiles
        params |= {
            "kv_heads": batch.cta_group_size,
            "group_size": batch.heads,
            "tokens": ends[-1],
            "m_tiles": 0 if batch.is_ragged() else m_tiles,
            "num_tiles": num_tiles,
            "takes_whole_tiles": not batch.is_ragged() and total_tiles >= 2 * batch.num_cta_groups,
            "window": batch.window if batch.is_causal else MAX_TOKENS,
            "is_causal": batch.is_causal,
            "max_tokens": MAX_TOKENS,
        }
    return scheduler.run(batch.num_cta_groups * batch.cta_group_size, params | changes)


def planned(batch: Batch, spec: MlaSm90Spec, sm_count: int) -> Batch:
    """Return the batch on the grid that the host plans for so many SMs."""
    tokens = sum(seq.q_len for seq in batch.seqs)
    q_len = 0 if batch.is_ragged() else batch.seqs[0].q_len
    shape = ProblemShape(
        batch=len(batch.seqs),
        q_len=q_len,
        tile_q_len=q_len or -(-tokens // len(batch.seqs)),
        heads=batch.heads,
        total_rows=tokens * batch.heads,
        max_kv_len=max(seq.kv_len for seq in batch.seqs),
    )
    plan = plan_mla_sm90(spec, shape, sm_count)
    return replace(batch, num_cta_groups=plan.num_cta_groups, cta_group_size=plan.cta_group_size)


class Attended(NamedTuple):
    """What the rows of a tile attend to."""

    kv_blocks: range
    kv_end: int  # of the last row
    unmasked_kv_end: int  # of the first row


def tiles_of(scheduler: TileScheduler, batch: Batch) -> dict[Tile, Attended]:
    """Return all M tiles, and what their rows attend to."""
    spec = scheduler.spec
    is_mla = isinstance(spec, MlaSm90Spec)
    found = {}
    for seq_idx, (kv_len, q_len) in enumerate(batch.seqs):
        rows = q_len * batch.heads
        for first_row in range(0, rows, spec.block_m):
            last_row = min(first_row + spec.block_m, rows) - 1
            first_end = last_end = kv_len
            if batch.is_causal:
                first_end = max(kv_len - q_len + first_row // batch.heads + 1, 0)
                last_end = max(kv_len - q_len + last_row // batch.heads + 1, 0)
            begin = 0 if is_mla or not batch.is_causal else max(first_end - batch.window, 0)
            blocks = range(begin // spec.block_n, -(-last_end // spec.block_n))
            for kv_head in range(1 if is_mla else batch.cta_group_size):
                tile = Tile(seq_idx, kv_head, first_row)
                found[tile] = Attended(blocks, last_end, first_end)
    return found


def by_tile(schedule: Schedule) -> dict[Tile, list[WorkItem]]:
    """Return the splits of each tile in order."""
    found = defaultdict(list)
    for work in schedule.work_items:
        found[Tile(work.seq_idx, work.kv_head, work.first_row)].append(work)
    return {
        tile: sorted(splits, key=lambda split: split.split_idx) for tile, splits in found.items()
    }
