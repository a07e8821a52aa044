"""Batch-invariant calls on a GPU: bitwise equality of each request alone and in random batches.

``MLAGEN_MLA_KERNEL=sm80`` and ``MLAGEN_GQA_KERNEL=sm80`` test the sm80 kernels too.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mlagen.settings import current_settings
from tests.problems import invariance as inv
from tests.problems.invariance import Batch, Facts, Form
from tests.problems.problem import E4M3
from tests.sm90_tiles import IS_SM90

ROOT = Path(__file__).resolve().parents[2]

# Around multiples of the tokens of a split, whichever kernel has how many.
LENS = (
    *(0, 1, 77, 20_000),
    *(split * times + more for split in (512, 1024) for times in (1, 2) for more in (-1, 0, 1)),
    *(3 * split + 5 for split in (512, 1024, 2048)),
)
FP16 = torch.float16
FORMS: dict[str, tuple[Form, Facts]] = {
    "mla, 1 head": (inv.mla, Facts(heads=1)),
    "mla, 8 heads, 4 tokens": (inv.mla, Facts(heads=8, q_len=4, dtype=FP16)),
    "mla, 128 heads": (inv.mla, Facts(heads=128)),
    "mla in e4m3, 16 heads": (inv.mla, Facts(heads=16, dtype=E4M3)),
    "mla in e4m3, 128 heads": (inv.mla, Facts(heads=128, dtype=E4M3)),
    "mla over e4m3, 64 heads": (inv.mla, Facts(heads=64, kv="e4m3")),
    "mla over fp8_ds_mla, 16 heads, 4 tokens": (inv.mla, Facts(q_len=4, kv="fp8_ds_mla")),
    "ragged mla": (inv.mla_ragged, Facts(heads=16, q_len=4)),
    "a rank of DCP": (inv.mla_dcp, Facts(heads=64)),
    "top-k indices": (inv.mla_sparse, Facts(heads=16, q_len=4)),
    "top-k indices over fp8_ds_mla": (inv.mla_sparse, Facts(heads=128, kv="fp8_ds_mla")),
    "two pools, 8 heads": (inv.dsv4, Facts(heads=8, kv="dsv4")),
    "two pools, 64 heads": (inv.dsv4, Facts(heads=64, kv="dsv4")),
    "xqa_mla": (inv.xqa_mla, Facts(heads=16, dtype=E4M3)),
    "xqa_batch_mla": (inv.xqa_batch_mla, Facts(heads=8, q_len=4, dtype=FP16)),
    "flare": (inv.flare, Facts(heads=16, min_len=1)),
    "mla wrapper": (inv.mla_wrapper, Facts(heads=16, q_len=4)),
    "small pages": (inv.mla, Facts(heads=16, page_size=8)),
    "gqa, 1 kv head": (inv.gqa, Facts(heads=8, kv_heads=1)),
    "gqa, 8 kv heads, 4 tokens": (inv.gqa, Facts(heads=64, kv_heads=8, q_len=4)),
    "gqa, a window": (inv.gqa, Facts(heads=16, kv_heads=2, window=1500)),
    "gqa, a soft cap": (inv.gqa, Facts(heads=16, kv_heads=8, soft_cap=30.0)),
    "gqa over e4m3": (inv.gqa, Facts(heads=64, kv_heads=8, kv="e4m3")),
    "gqa over int8": (inv.trtllm_gqa, Facts(heads=8, kv_heads=8, kv="int8")),
    "gqa over nvfp4, 4 tokens": (inv.trtllm_gqa, Facts(heads=32, kv_heads=8, kv="nvfp4", q_len=4)),
    "gqa of 512 dims": (inv.gqa, Facts(heads=16, kv_heads=2, head_dim=512, page_size=16)),
    "ragged gqa": (inv.gqa_ragged, Facts(heads=64, kv_heads=8, q_len=4)),
    "xqa": (inv.xqa, Facts(heads=64, kv_heads=8)),
    "gqa wrapper": (inv.gqa_wrapper, Facts(heads=64, kv_heads=8)),
}
# The workspace of the sm90 kernels has a bound; that of the sm80 kernels grows with the batch.
LARGE, SMALL = 4 << 30, 72 << 20
OF_SM80 = ("small pages",)


def size_of(seed: int, name: str) -> int:
    """Return the bytes of a workspace."""
    settings = current_settings()
    is_sm80 = not IS_SM90 or name in OF_SM80 or "sm80" in (settings.mla_kernel, settings.gqa_kernel)
    return LARGE + seed * 4096 if is_sm80 or seed % 3 else SMALL


@pytest.mark.parametrize("name", FORMS)
def test_a_request_has_the_bits_that_it_has_alone(name: str, device: str) -> None:
    """In 50 batches: any place, memory, workspace and sizes, beside requests with NaN."""
    form, facts = FORMS[name]
    requests = inv.build(facts, LENS, device)
    expected = inv.alone(form, requests)
    for seed in range(50):
        most, size = 300 if seed % 2 else 20, size_of(seed, name)
        batch = inv.random_batch(requests, seed, most, workspace_bytes=size)
        assert inv.differing(form(batch), batch, expected) == [], (
            f"batch {seed} of {len(batch.idx)}"
        )


@pytest.mark.parametrize("name", ["mla, 1 head", "mla, 128 heads", "gqa over e4m3"])
def test_a_replayed_graph_has_the_bits_of_eager_calls(name: str, device: str) -> None:
    """And without the mode some bits change in a batch."""
    form, facts = FORMS[name]
    requests = inv.build(facts, LENS, device)
    batch = inv.random_batch(requests, 3, 100, workspace_bytes=LARGE)
    eager = [bits.clone() for bits in form(batch)]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        form(batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = form(batch)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(captured, eager, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    expected = inv.alone(form, requests)
    off = Batch(of=requests, idx=batch.idx, batch_invariant=False)
    assert inv.differing(form(off), off, expected)


def digest_of(name: str) -> str:
    """Return a digest of the bits of all requests of a form."""
    form, facts = FORMS[name]
    requests = inv.build(facts, LENS, "cuda")
    batch = inv.random_batch(requests, 5, 50, workspace_bytes=LARGE)
    parts = [part.contiguous().view(torch.uint8).cpu().numpy() for part in form(batch)]
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def test_other_processes_and_gpus_of_one_model_compute_the_same_bits() -> None:
    """By all sm90 kernels: a process for each GPU that is like the first one."""
    names = ("mla, 128 heads", "mla in e4m3, 16 heads", "two pools, 64 heads", "gqa over e4m3")
    program = f"from {__name__} import digest_of\nfor n in {names}: print(digest_of(n))"
    models = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    here = [digest_of(name) for name in names]
    for index in [index for index, model in enumerate(models) if model == models[0]]:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(index)},
        )
        assert done.stdout.split() == here, f"GPU {index}"
