"""Warm-up of a worker: which kernels it loads, what it compiles, and what is frozen after it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen import engine
from mlagen.errors import MissError
from mlagen.integrations import warm_up as module
from mlagen.integrations.dsv4 import dsv4_calls
from mlagen.integrations.warm_up import gqa_calls, mla_calls, warm_up
from mlagen.jit import freeze, jit_mode
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.families import gqa_call_specs, mla_call_specs
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.variant import require_supported
from tests.fixture_types import Log, Patch
from tests.kernels import COMBINE, SM_80, SM_90A

KERNELS = [COMBINE, replace(COMBINE, head_dim_vo=256)]  # that compile in 0.1 s each
LAYER: dict[str, Any] = {"heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64}
LAYER |= {"query_dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
GQA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "page_size": 32}
GQA |= {"query_dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}


@pytest.fixture
def loaded(monkeypatch: Patch) -> list[tuple[KernelSpec, int]]:
    """Return the kernels that are loaded on a GPU, which has two kernels for any call."""
    loaded: list[tuple[KernelSpec, int]] = []
    monkeypatch.setattr(module, "arch_of_device", lambda _: SM_80)
    monkeypatch.setattr(module, "call_specs", lambda *_: KERNELS)
    monkeypatch.setattr(module, "kernel_for", lambda *kernel: loaded.append(kernel))
    monkeypatch.setattr("mlagen.jit._frozen", "on")
    return loaded


def set_mode(monkeypatch: Patch, mode: str) -> None:
    """Set MLAGEN_JIT for this test."""
    monkeypatch.setenv("MLAGEN_JIT", mode)
    current_settings.cache_clear()


@pytest.mark.parametrize(
    ("mode", "after", "word"),
    [("on", "on", "not frozen"), ("warn", "warn", "not frozen"), ("freeze", "error", "frozen")],
)
def test_kernels_are_compiled_and_loaded_then_frozen_if_asked(
    loaded: list[tuple[KernelSpec, int]], mode: str, after: str, word: str, monkeypatch: Patch
) -> None:
    """The worker says in one line how many kernels it has; ``freeze`` compiles no other one."""
    set_mode(monkeypatch, mode)
    lines: list[str] = []

    for _ in range(2):  # a draft model has a warm-up of its own
        warm_up(mla_calls(**LAYER), 3, lines.append)

    assert loaded == [(spec, 3) for spec in KERNELS] * 2
    assert [line.partition(" s: ")[2] for line in lines] == [
        f"2 kernels loaded, {built} of them compiled; {word}" for built in (2, 0)
    ]
    assert jit_mode() == after


def test_a_frozen_worker_names_the_variable(
    loaded: list[tuple[KernelSpec, int]], monkeypatch: Patch
) -> None:
    """A call that no warm-up foresaw raises an error with ``MLAGEN_JIT=freeze`` in it."""
    set_mode(monkeypatch, "freeze")
    warm_up([], 0)
    with pytest.raises(MissError, match="MLAGEN_JIT=freeze forbids to compile"):
        engine.find_or_build(COMBINE)
    warm_up(mla_calls(**LAYER), 0)
    assert len(loaded) == 2


@pytest.mark.parametrize("mode", ["error", "off"])
def test_a_worker_that_may_not_compile_loads_what_is_cached(
    loaded: list[tuple[KernelSpec, int]], mode: str, monkeypatch: Patch, caplog: Log
) -> None:
    """Missing kernels are warnings, since the server may not need them."""
    engine.find_or_build(KERNELS[0])
    set_mode(monkeypatch, mode)
    lines: list[str] = []

    warm_up(mla_calls(**LAYER), 0, lines.append)

    assert loaded == [(KERNELS[0], 0)]
    assert lines[0].endswith("1 kernels loaded, 0 of them compiled, 1 missing; frozen")
    command = f"{'MLAGEN_JIT=on ' * (mode == 'off')}mlagen prewarm --kernel '{KERNELS[1]}'"
    assert f"warm-up: {KERNELS[1]}: not in the cache; run: {command}" in caplog.text


def test_a_layer_without_a_kernel_is_a_warning(monkeypatch: Patch, caplog: Log) -> None:
    """A layer that another backend serves does not end the warm-up of the others."""
    monkeypatch.setattr(module, "arch_of_device", lambda _: SM_80)
    lines: list[str] = []
    with caplog.at_level(logging.WARNING, logger="mlagen"):
        warm_up(gqa_calls(**GQA | {"head_dim": 40}), 0, lines.append)
    assert "warm-up: no GQA decode kernel for head_dim 40" in caplog.text
    assert "0 kernels loaded" in lines[0]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("dcp_size", [1, 4])
@pytest.mark.parametrize("max_q_len", [1, 3])
def test_mla_calls_have_kernels_for_each_query_length_and_mask(
    kv_dtype: torch.dtype, is_sparse: bool, dcp_size: int, max_q_len: int
) -> None:
    """Ragged requests have fewer tokens than the most, and DCP ranks mask by global positions."""
    found = mla_calls(
        **LAYER | {"kv_dtype": kv_dtype},
        max_q_len=max_q_len,
        is_sparse=is_sparse,
        dcp_size=dcp_size,
    )

    tokens = 1 if is_sparse else max_q_len
    masks = {"causal", "dcp"} if dcp_size > 1 and not is_sparse else {"causal"}
    rows = {16 * q_len for q_len in range(1, tokens + 1)}
    assert {(variant.mask, count) for variant, count in found} == {
        (mask, count) for mask in masks for count in rows
    }
    for variant, count in found:
        assert variant.lookup == ("sparse" if is_sparse else "paged")
        require_supported(variant)
        assert mla_call_specs(SM_90A, variant, count)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_the_call_of_deepseek_v4_has_kernels(heads: int) -> None:
    """Each query token is a sequence, with lists of any width into two pools."""
    ((variant, rows),) = dsv4_calls(heads)
    assert (variant.kv_dtype, variant.lookup, rows) == (DType.FP8_DSV4, "two_pools", heads)
    require_supported(variant)
    assert mla_call_specs(SM_90A, variant, rows)


def test_gqa_calls_have_the_rows_of_a_kv_head() -> None:
    """The page, the dtypes and the group of a layer select the kernels."""
    found = gqa_calls(**GQA, max_q_len=2)
    assert [rows for _, rows in found] == [4, 8]
    (variant,) = {variant for variant, _ in found}
    assert (variant.kv_dtype, variant.page_size) == (DType.E4M3, 32)
    assert gqa_call_specs(SM_90A, variant, 4)


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Lift a freeze after each test."""
    yield
    freeze("on")
