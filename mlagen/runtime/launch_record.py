"""Record of the kernels that the calls of a thread launch, for the log and the dumps of calls.

What enqueues launches reports their kernels to the open records: ``if records: report(...)``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mlagen.spec.kernel import KernelSpec

records: dict[int, list[KernelSpec]] = {}  # by thread; empty while no call is recorded


@contextmanager
def record_launches() -> Iterator[list[KernelSpec]]:
    """Yield a list that gets each kernel that this thread launches, once; records may nest."""
    thread = threading.get_ident()
    outer = records.get(thread)
    kernels = records[thread] = []
    try:
        yield kernels
    finally:
        del records[thread]
        if outer is not None:
            records[thread] = outer
            _add(outer, kernels)


def report(specs: Sequence[KernelSpec]) -> None:
    """Add kernels whose launches are enqueued to the record of this thread, if it has one."""
    if (kernels := records.get(threading.get_ident())) is not None:
        _add(kernels, specs)


def _add(kernels: list[KernelSpec], specs: Sequence[KernelSpec]) -> None:
    kernels.extend(spec for spec in dict.fromkeys(specs) if spec not in kernels)
