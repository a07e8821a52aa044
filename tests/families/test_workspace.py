"""Workspace sizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families import workspace
from mlagen.families.common import plan_sm80
from mlagen.families.gqa import plan as gqa_select
from mlagen.families.mla import launch as mla_launch
from mlagen.families.mla import plan as mla_plan
from mlagen.families.workspace import _max_bytes_per_sm
from mlagen.runtime import device
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from tests.families.launches import H200, H200_FACTS, launched, record_launches
from tests.families.shapes import mla_shape
from tests.fixture_types import Patch
from tests.kernels import SM_80, SM_90A, SM_COUNTS, mla_sm80
from tests.problems.mla import MlaCase

E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("h200")


def choose(kernel: str, monkeypatch: Patch) -> None:
    """Set the requested kernel."""
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", kernel)
    current_settings.cache_clear()


KERNELS = ("auto", "sm80", "sm90")


BATCHES, LENGTHS = (1, 2, 7, 33, 80, 130, 400), (1, 700, 5000, 131_072)
MAX_CALLS: dict[str, dict[str, Any]] = {
    "MLA": {},
    "e4m3": {"dtype": E4M3},
    "bf16 over e4m3": {"kv_dtype": E4M3},
    "sparse": {"sparse_mla_top_k": 2048},
    **{f"GQA of {head_dim}": {"kv_heads": 1, "head_dim": head_dim} for head_dim in (64, 128, 512)},
}


@pytest.mark.parametrize("call", MAX_CALLS.values(), ids=MAX_CALLS)
def test_no_call_needs_more_than_the_maximum(call: dict[str, Any], monkeypatch: Patch) -> None:
    """The bound holds for all batch sizes, heads, lengths and GPUs, of every kernel."""
    gpus = [replace(H200_FACTS, sm_count=sm_count) for sm_count in SM_COUNTS]
    for module in (plan_sm80, mla_plan, gqa_select, workspace):
        monkeypatch.setattr(module, "device_facts", gpus.__getitem__)

    shares = [
        mlagen.workspace_bytes(
            batch=batch, q_len=1, heads=heads, max_seq_len=length, device=index, **call
        )
        / mlagen.max_workspace_bytes(index)
        for index in range(len(gpus))
        for batch, heads, length in product(BATCHES, (1, 16, 48, 128, 256), LENGTHS)
    ]
    assert 0 < max(shares) <= 1


@pytest.mark.parametrize("arch", [SM_80, SM_90A], ids=str)
def test_no_mask_needs_more_than_the_maximum(arch: Arch) -> None:
    """The bound holds for the sm80 kernels of ``flare_mla_decoding``, on each architecture."""
    needed = set()
    shapes = product((1, 7, 64, 132, 700), (0, 1, 6), (1, 16, 128, 256), (0, 100, 5000, 200_000))
    variants = product(
        (16, 32, 64), (DType.BF16, DType.E4M3, DType.FP8_PER_TOKEN), ("causal", "bias")
    )
    specs = [
        mla_sm80(arch=arch, rows=rows, query_dtype=dtype, kv_dtype=dtype, mask=mask)
        for rows, dtype, mask in variants
    ]
    for (batch, q_len, heads, max_kv_len), spec in product(shapes, dict.fromkeys(specs)):
        problem = mla_shape(batch, heads, max_kv_len, q_len, None if q_len else batch)
        needed |= {
            plan_sm80.plan_sm80(spec, problem, sms).workspace_bytes / sms for sms in SM_COUNTS
        }

    assert 0 < max(needed) <= _max_bytes_per_sm(arch)


def test_the_maximum_is_that_of_full_tiles() -> None:
    """Four waves of the largest tile of MLA, 64 fp32 rows of 512 elements with their LSE."""
    assert mlagen.max_workspace_bytes() == 132 * 4 * 64 * (512 + 1) * 4


def test_a_cpu_needs_no_workspace() -> None:
    """Nor does its buffer have to exist."""
    assert mlagen.max_workspace_bytes("cpu") == mlagen.max_workspace_bytes(torch.device("cpu")) == 0


LONG = MlaCase(name="", seq_lens=(70, 3), heads=24)
SIZES: dict[str, Any] = {"batch": 2, "q_len": 1, "heads": 24, "max_seq_len": 50_000}
RAGGED = {"q_len": 4, "tokens": 5}
FEW = MlaCase(name="", dtype=E4M3, heads=8, seq_lens=(9,) * 8, q_lens=(1,) * 5 + (0,) * 3)
CALLS: dict[str, tuple[MlaCase, dict[str, Any]]] = {
    "bf16": (LONG, {}),
    "rank 256": (replace(LONG, kv_lora_rank=256, page_size=1), {"kv_lora_rank": 256}),
    "e4m3": (replace(LONG, dtype=E4M3), {"dtype": E4M3}),
    "bf16 over e4m3": (replace(LONG, kv_format="e4m3"), {"kv_dtype": E4M3}),
    "fp8_ds_mla": (replace(LONG, kv_format="fp8_ds_mla"), {"kv_dtype": torch.uint8}),
    "sparse": (replace(LONG, top_k=2048), {"sparse_mla_top_k": 2048}),
    "separate values": (replace(LONG, values="other pages"), {}),
    "ragged": (replace(LONG, q_lens=(1, 4)), RAGGED),
    "ragged, without the longest": (replace(LONG, q_lens=(1, 4)), RAGGED),
    # The tiles of shared values, or of the longest query, need less.
    "separate values of few heads": (
        replace(LONG, heads=8, q_len=3, values="other pages"),
        {"q_len": 3, "max_seq_len": 2000},
    ),
    "few ragged, without the longest": (FEW, RAGGED | {"max_seq_len": 8192, "dtype": E4M3}),
}
SUPPORTED_BY_SM90 = ("bf16", "ragged", "ragged, without the longest")


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        (name, kernel)
        for name, kernel in product(CALLS, KERNELS)
        if kernel != "sm90" or name in SUPPORTED_BY_SM90
    ],
)
def test_the_size_is_sufficient(name: str, kernel: str, monkeypatch: Patch) -> None:
    """A call accepts a workspace of exactly this size, with either kernel and any tile."""
    choose(kernel, monkeypatch)
    case, changes = CALLS[name]
    sizes = SIZES | {"batch": len(case.seq_lens), "heads": case.heads} | changes
    needed = mlagen.workspace_bytes(page_size=case.page_size, **sizes)
    launches = record_launches(monkeypatch)
    workspace = torch.zeros(needed, dtype=torch.uint8)
    inputs = case.build("cpu").inputs(max_seq_len=sizes["max_seq_len"], workspace_buffer=workspace)
    if "without the longest" in name:
        inputs = inputs._replace(max_q_len=None)

    for taken in ("sm80", "sm90") if kernel == "auto" else (kernel,):
        if taken == "sm80" or name in SUPPORTED_BY_SM90:
            call, _, _ = launched(inputs, launches, taken)
            assert 0 < call.plan.workspace_bytes <= needed
            assert "few" not in name or call.plan.workspace_bytes == needed or kernel == "auto"


@pytest.mark.parametrize("max_seq_len", [100, 5000])
def test_the_size_covers_both_kernels(max_seq_len: int, monkeypatch: Patch) -> None:
    """With ``auto`` the size is the larger of both kernels."""
    sizes = {}
    for kernel in KERNELS:
        choose(kernel, monkeypatch)
        sizes[kernel] = mlagen.workspace_bytes(**SIZES | {"max_seq_len": max_seq_len})

    assert sizes["auto"] == max(sizes["sm80"], sizes["sm90"])
    assert sizes["sm80"] != sizes["sm90"]


@pytest.mark.parametrize("kv_dtype", [None, E4M3, torch.int8, torch.uint8])
def test_grouped_query_sizes(kv_dtype: torch.dtype | None) -> None:
    """With kv_heads and head_dim the size is of grouped-query attention; a window reduces it."""
    sizes = SIZES | {"heads": 16, "kv_heads": 2, "head_dim": 128, "kv_dtype": kv_dtype}

    whole = mlagen.workspace_bytes(**sizes)

    # The sm90 kernel: two splits of four CTAs, eight rows of 128 values, max and sum.
    assert whole > mlagen.workspace_bytes(**sizes, window_left=63) == 2 * 4 * 8 * (128 + 2) * 4
    assert mlagen.workspace_bytes(**sizes | RAGGED) > 0


@pytest.mark.parametrize("kind", [{}, {"kv_heads": 8, "head_dim": 128}], ids=["MLA", "GQA"])
def test_a_batch_invariant_size_is_that_of_sm80(kind: dict[str, Any], monkeypatch: Patch) -> None:
    """Separate page ids of MLA, tables of heads, and rows with scales between take that kernel."""
    sizes = SIZES | {"batch": 64, "batch_invariant": True} | kind
    needed = mlagen.workspace_bytes(**sizes)

    for name in ("MLAGEN_MLA_KERNEL", "MLAGEN_GQA_KERNEL"):
        monkeypatch.setenv(name, "sm80")
    current_settings.cache_clear()

    assert needed == mlagen.workspace_bytes(**sizes)
    splits = 52  # of 53,248 tokens, to which the length is rounded up; and row_splits
    assert needed == 64 * 24 * (splits * (sizes.get("head_dim", 512) + 1) * 4 + 4)


ONE: dict[str, Any] = {"batch": 1, "q_len": 1, "heads": 16, "max_seq_len": 100}
DTYPES = ": expected torch.bfloat16 or torch.float16 or torch.float8_e4m3fn, got "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": -1}, "batch: expected an int, 0 or more, got -1"),
        ({"q_len": 0}, "q_len: expected an int, 1 or more, got 0"),
        ({"heads": 1.5}, "heads: expected an int, 1 or more, got 1.5"),
        ({"batch": 1 << 27}, "tokens * heads: expected 2147483647 or less, got 2147483648"),
        ({"dtype": torch.float32}, f"dtype{DTYPES}torch.float32"),
        ({"dtype": [1]}, f"dtype{DTYPES}[1]"),
        ({"device": "cpu"}, "device: expected a GPU: cuda, got cpu"),
        ({"device": "gpu7"}, "device: expected the index of a GPU or a torch.device, got 'gpu7'"),
        ({"kv_heads": 2}, "head_dim: expected an int, required with kv_heads, got None"),
        ({"head_dim": 64}, "kv_heads: expected an int, required with head_dim, got None"),
        ({"kv_heads": 3, "head_dim": 128}, "heads: expected a multiple of 3 (kv_heads), got 16"),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else None,
)
def test_an_invalid_size_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The message names the number, the rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        mlagen.workspace_bytes(**ONE | changes)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "kernel", "message"),
    [
        ({"kv_lora_rank": 256}, "sm90", "MLAGEN_MLA_KERNEL=sm90: no such kernel for"),
        ({"kv_lora_rank": 384}, "auto", "no MLA decode kernel for query bf16"),
    ],
)
def test_unsupported_calls_are_rejected(
    changes: dict[str, Any], kernel: str, message: str, monkeypatch: Patch
) -> None:
    """Unsupported arguments are rejected as in the call."""
    monkeypatch.setattr(mla_launch, "arch_of_device", lambda _: H200)
    choose(kernel, monkeypatch)

    with pytest.raises(UnsupportedError, match=f"^{message}"):
        mlagen.workspace_bytes(**ONE | changes)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), 0])
@pytest.mark.parametrize("other", ["cuda:1", torch.device("cuda", 1), 1])
def test_the_size_is_of_the_given_gpu(device: Any, other: Any, monkeypatch: Patch) -> None:
    """A GPU may be given in all of torch's ways; one with fewer SMs has fewer partial results."""
    facts = [H200_FACTS, replace(H200_FACTS, index=1, sm_count=16)]
    for module in (plan_sm80, mla_plan):
        monkeypatch.setattr(module, "device_facts", facts.__getitem__)

    whole = mlagen.workspace_bytes(**SIZES)

    assert mlagen.workspace_bytes(device=device, **SIZES) == whole
    assert 0 < mlagen.workspace_bytes(device=other, **SIZES) < whole


def test_cuda_is_the_current_gpu_of_torch(monkeypatch: Patch) -> None:
    """As everywhere in torch."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    facts = [H200_FACTS, replace(H200_FACTS, index=1, sm_count=16)]
    for module in (plan_sm80, mla_plan, workspace):
        monkeypatch.setattr(module, "device_facts", facts.__getitem__)

    for size in (partial(mlagen.workspace_bytes, **SIZES), mlagen.max_workspace_bytes):
        assert size(device="cuda") == size(device=1) < size(device=0)


@pytest.mark.parametrize("device", ["cpu:junk", "gpu7", "mps"])
def test_no_device_has_a_maximum_without_a_gpu(device: str) -> None:
    """Only a CPU needs no workspace."""
    with pytest.raises(ArgumentError, match=r"^device: expected .*, got "):
        mlagen.max_workspace_bytes(device)


def test_a_missing_gpu_is_rejected(monkeypatch: Patch) -> None:
    """The message names the number of GPUs."""
    monkeypatch.setattr("mlagen.runtime.device.visible_devices", list)
    for name in ("arch_of_device", "device_facts"):
        monkeypatch.setattr(mla_plan, name, getattr(device, name))

    with pytest.raises(ArgumentError) as caught:
        mlagen.workspace_bytes(**ONE, device=77)

    assert str(caught.value) == "device: expected one of 0 visible GPUs, got 77"
