"""Record of the kernels that a call launches, for the log and the dumps of calls.

The first record replaces :meth:`Launch.enqueue`, so that a process without one pays nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mlagen.runtime.launch import Launch
from mlagen.spec.kernel import KernelSpec


class _Thread(threading.local):
    """The record in progress of one thread."""

    def __init__(self) -> None:
        self.kernels: list[KernelSpec] | None = None


_thread = _Thread()
_enqueue = Launch.enqueue


@contextmanager
def record_launches() -> Iterator[list[KernelSpec]]:
    """Yield a list that gets each kernel that this thread launches, once; records may nest."""
    Launch.enqueue = _recorded_enqueue  # type: ignore[method-assign,assignment]
    outer = _thread.kernels
    kernels: list[KernelSpec] = []
    _thread.kernels = kernels
    try:
        yield kernels
    finally:
        _thread.kernels = outer
        for spec in kernels:
            _add(outer, spec)


def _recorded_enqueue(launch: Launch, enable_pdl: bool) -> None:
    _enqueue(launch, enable_pdl)
    _add(_thread.kernels, launch.kernel.spec)


def _add(kernels: list[KernelSpec] | None, spec: KernelSpec) -> None:
    if kernels is not None and spec not in kernels:
        kernels.append(spec)
