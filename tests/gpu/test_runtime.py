"""Loading, streams, CUDA graphs and threads on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import mlagen
from mlagen import engine
from mlagen.families.dispatch import MLA
from mlagen.settings import current_settings
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, MlaProblem


def decode(**arguments: Any) -> torch.Tensor:
    """Return the output of one call."""
    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert isinstance(out, torch.Tensor)
    return out


_ROOT = str(Path(__file__).resolve().parents[2])

WHOLE = MlaCase(name="whole", seq_lens=(70, 3, 200), heads=16)
SPLIT = MlaCase(name="split", seq_lens=(5000, 70), heads=16, with_sinks=True)


def test_many_replays_give_the_same_bits() -> None:
    """A thousand replays of a split call agree."""
    problem = SPLIT.build("cuda")
    out = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16, device="cuda")
    arguments = problem.arguments()
    first = decode(**arguments, out=out).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(**arguments, out=out)

    outs = []
    for replay in range(1000):
        if replay % 100 == 99:
            out.fill_(float("nan"))
        graph.replay()
        if replay % 100 == 99:
            outs.append(out.clone())
    torch.cuda.synchronize()

    assert len(outs) == 10
    assert all(torch.equal(first, other) for other in outs)


_CAPTURE_FIRST = """
import torch, mlagen
from tests.problems.mla import MlaCase
problem = MlaCase(seq_lens=(5000,), heads=16).build("cuda")
arguments = problem.arguments()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
except mlagen.CaptureError as error:
    print(error)
else:
    raise SystemExit("captured without a kernel")
mlagen.prewarm(archs="native", heads=16, page_size=64, load=True)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
graph.replay()
torch.cuda.synchronize()
problem.check(out)
print("captured after prewarm")
"""


def test_capture_without_a_loaded_kernel_names_the_remedy() -> None:
    """A process that captures first gets an error; after following it the capture works."""
    done = subprocess.run(
        [sys.executable, "-c", _CAPTURE_FIRST],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=_ROOT,
        env=os.environ | {"PYTHONPATH": _ROOT},
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "nothing can be loaded while a CUDA graph is captured" in done.stdout
    assert "mlagen.prewarm(archs='native', load=True)" in done.stdout
    assert done.stdout.endswith("captured after prewarm\n")


@pytest.mark.parametrize("enable_pdl", [True, False], ids=["with pdl", "without pdl"])
def test_a_call_waits_for_its_inputs(enable_pdl: bool) -> None:
    """In a chain of calls each reads the output of the preceding one."""
    problem = replace(SPLIT, with_sinks=False).build("cuda")
    arguments = problem.arguments(enable_pdl=enable_pdl)
    start = problem.query.clone()

    def chain(links: int, *, wait: bool) -> torch.Tensor:
        query = start.clone()
        for _ in range(links):
            out = decode(**arguments | {"query": query})
            decode(**arguments | {"query": query}, out=out)
            query[..., :512] = out * 20
            if wait:
                torch.cuda.synchronize()
        return query

    expected = chain(40, wait=True)

    assert torch.equal(expected, chain(40, wait=False))


def test_threads_share_only_kernels() -> None:
    """Eight concurrent threads each get their own result."""
    problems = [replace(SPLIT, seed=seed, heads=16 + seed).build("cuda") for seed in range(8)]
    failures: list[BaseException] = []

    def work(problem: MlaProblem) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                for _ in range(20):
                    out = decode(**problem.arguments())
                torch.cuda.current_stream().synchronize()
            problem.check(out)
        except BaseException as error:  # noqa: BLE001 - re-raised in the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(problem,)) for problem in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []


def test_a_new_thread_can_call() -> None:
    """A thread without a CUDA context launches on the default stream."""
    problem = SPLIT.build("cuda")
    out = torch.full((2, 1, 16, 512), float("nan"), dtype=torch.bfloat16, device="cuda")
    arguments = problem.arguments(out=out)
    expected = decode(**arguments).clone()
    out.fill_(float("nan"))
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            decode(**arguments)
        except BaseException as error:  # noqa: BLE001 - re-raised in the test's thread
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()

    assert failures == []
    assert torch.equal(expected, out)


def test_a_call_of_another_signature_reuses_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded kernel is neither looked up in the store nor loaded again."""
    problem = WHOLE.build("cuda")
    arguments = problem.arguments()
    first = decode(**arguments)
    lookups: list[str] = []
    monkeypatch.setattr(engine, "find_or_build", lambda *_, **__: lookups.append("store"))
    monkeypatch.setattr("mlagen.runtime.loader.load", lambda *_: lookups.append("driver"))
    MLA.clear()

    again = decode(**arguments)

    assert torch.equal(first, again)
    assert lookups == []


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_the_workspace_must_be_large_enough(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace one byte too small is rejected with both sizes, before anything is written."""
    if kernel == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", kernel)
    current_settings.cache_clear()
    problem = SPLIT.build("cuda")
    needed = mlagen.workspace_bytes(batch=2, q_len=1, heads=16, max_seq_len=5000)
    small = torch.zeros(needed - 1, dtype=torch.uint8, device="cuda")
    out = torch.full((2, 1, 16, 512), 7.0, dtype=torch.bfloat16, device="cuda")

    with pytest.raises(mlagen.ArgumentError) as caught:
        decode(**problem.arguments(workspace_buffer=small, out=out))

    expected = f"{needed} bytes or more for this call"
    assert str(caught.value) == f"workspace_buffer: expected {expected}, got {needed - 1} bytes"
    assert (out == 7.0).all()


def test_every_gpu_uses_its_own_tensors() -> None:
    """A call runs on the device of its tensors, whichever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    latent = SPLIT.build("cuda:1")
    grouped = GqaCase(seq_lens=(5000, 70)).build("cuda:1")

    out = decode(**latent.arguments())
    grouped_out = mlagen.decode.xqa_batch_decode_with_kv_cache(**grouped.arguments())
    assert isinstance(grouped_out, torch.Tensor)

    assert out.device == grouped_out.device == torch.device("cuda:1")
    latent.check(out)
    grouped.check(grouped_out)
