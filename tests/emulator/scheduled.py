"""The tile schedulers of the sm90 kernels on the CPU: their own source, without the kernels."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import NamedTuple

from mlagen.spec.gqa.sm90 import GqaSm90Spec
from mlagen.spec.mla.sm90 import MlaSm90Spec
from tests.emulator.emulated import compile_host, host_source
from tests.templates.headers import flattened

# Of the CTA that computes a range together: few, so that a thread has several sequences.
MLA_THREADS = 64

_THREADS = re.compile(r"^constexpr int kThreads = .*;$", re.MULTILINE)
_MAX_CTAS = 160
MAX_WORK_ITEMS = 1 << 16


class Range(NamedTuple):
    """What a CTA knows of its range: `RangeRecord`."""

    cta: int
    begin: int
    end: int
    num_ranges: int
    fixed_overhead_blocks: int


class WorkItem(NamedTuple):
    """A work item: `WorkRecord`."""

    cta: int
    work_idx: int
    seq_idx: int
    first_query: int
    kv_head: int
    first_row: int
    rows: int
    first_kv_block: int
    num_kv_blocks: int
    kv_end: int
    unmasked_kv_end: int
    num_splits: int
    num_reducers: int
    split_idx: int
    first_split_cta: int

    @property
    def end_kv_block(self) -> int:
        """The end of the split."""
        return self.first_kv_block + self.num_kv_blocks


class Schedule(NamedTuple):
    """What all CTAs of a grid compute."""

    ranges: list[Range]
    work_items: list[WorkItem]


class TileScheduler:
    """The tile scheduler of a kernel."""

    def __init__(self, spec: MlaSm90Spec | GqaSm90Spec) -> None:
        self.spec = spec
        is_mla = isinstance(spec, MlaSm90Spec)
        header = "scheduler/sched_meta_cache.cuh" if is_mla else "scheduler_warp.cuh"
        text = host_source(flattened([f'#include "{header}"'], spec))
        if is_mla:
            text, count = _THREADS.subn(f"constexpr int kThreads = {MLA_THREADS};", text)
            assert count == 1
        family = "mla" if is_mla else "gqa"
        source = f'{text}\n#include "schedule_{family}.h"\n'
        self._schedule = compile_host(source).schedule
        self._schedule.restype = ctypes.c_char_p
        self._ranges = ctypes.create_string_buffer(_MAX_CTAS * 4 * len(Range._fields))
        self._works = ctypes.create_string_buffer(MAX_WORK_ITEMS * 4 * len(WorkItem._fields))

    def run(self, num_ctas: int, params: dict[str, int | ctypes.Array[ctypes.c_int]]) -> Schedule:
        """Return the schedule of a grid; parameters that it does not depend on may be missing."""
        values: list[int | bytes | float] = []
        for parameter in self.spec.parameters:
            value = params.get(parameter.name, 0)
            if isinstance(value, ctypes.Array):
                value = ctypes.addressof(value)
            values.append(b"" if parameter.code.endswith("s") else value)
        packed = struct.pack("<" + "".join(one.code for one in self.spec.parameters), *values)
        counts = (ctypes.c_int * 2)()
        complaint = self._schedule(
            packed.ljust(-(-len(packed) // 64) * 64, b"\0"),
            num_ctas,
            self._ranges,
            self._works,
            MAX_WORK_ITEMS,
            counts,
        )
        assert not complaint, complaint
        return Schedule(
            [Range._make(one) for one in _records(self._ranges, counts[0], Range)],
            [WorkItem._make(one) for one in _records(self._works, counts[1], WorkItem)],
        )


def _records(
    buffer: ctypes.Array[ctypes.c_char], count: int, kind: type[Range | WorkItem]
) -> list[tuple[int, ...]]:
    packing = struct.Struct(f"<{len(kind._fields)}i")
    return list(packing.iter_unpack(memoryview(buffer)[: count * packing.size]))
