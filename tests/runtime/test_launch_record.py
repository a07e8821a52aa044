"""Record of the kernels that a thread launches."""

from __future__ import annotations

import threading

import pytest

from mlagen.runtime import launch_record
from mlagen.runtime.launch import Launch
from mlagen.runtime.launch_record import record_launches
from mlagen.runtime.loader import LoadedKernel
from mlagen.spec.kernel import KernelSpec, packing_of
from tests.kernels import COMBINE, mla_sm80


@pytest.fixture(autouse=True)
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Replace the driver; return the enqueued launches."""
    launches: list[Launch] = []
    monkeypatch.setattr(Launch, "enqueue", Launch.enqueue)  # undone after the test
    monkeypatch.setattr(launch_record, "_enqueue", lambda launch, _: launches.append(launch))
    return launches


def launch_of(spec: KernelSpec) -> Launch:
    """Return a launch without parameters."""
    launch = Launch.__new__(Launch)
    launch._kernel = LoadedKernel(spec, 0, packing_of(spec), None, None)
    return launch


def test_each_kernel_is_recorded_once_in_order(enqueued: list[Launch]) -> None:
    """A replayed launch counts like a first one, and every launch is enqueued."""
    decode, combine = launch_of(mla_sm80()), launch_of(COMBINE)
    with record_launches() as kernels:
        for launch in (decode, combine, decode):
            launch.enqueue(enable_pdl=True)
    decode.enqueue(enable_pdl=True)
    assert kernels == [mla_sm80(), COMBINE]
    assert enqueued == [decode, combine, decode, decode]


def test_a_record_has_the_launches_of_its_thread_and_of_inner_records() -> None:
    """A launch of another thread is not in it, one within an inner record is in both."""
    combine, decode = launch_of(COMBINE), launch_of(mla_sm80())
    with record_launches() as kernels:
        thread = threading.Thread(target=decode.enqueue, args=(True,))
        thread.start()
        thread.join()
        with record_launches() as inner:
            combine.enqueue(enable_pdl=True)
        combine.enqueue(enable_pdl=True)

    assert (kernels, inner) == ([COMBINE], [COMBINE])
