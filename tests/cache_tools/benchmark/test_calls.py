"""Cases as calls of mlagen on the CPU backend, and of FlashInfer, played by mlagen."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mlagen
from cache_tools.benchmark.calls import mlagen_call
from cache_tools.benchmark.inputs import Inputs, make_inputs
from cache_tools.benchmark.peer import _causal_mask, flashinfer_call, flashinfer_version
from cache_tools.benchmark.reference import attend, relative_error
from cache_tools.benchmark.selection import case_of

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "MLA": ("mla", {}),
    "MLA with drafts, over e4m3": ("mla", {"q_len": 3, "kv_dtype": "e4m3"}),
    "MLA in fp16": ("mla", {"dtype": "fp16"}),
    "GQA": ("gqa", {}),
    "GQA with drafts, over e4m3": ("gqa", {"q_len": 3, "kv_dtype": "e4m3", "head_dim": 64}),
}
parametrized = pytest.mark.parametrize(("family", "facts"), CASES.values(), ids=CASES)


def args_of(family: str, facts: dict[str, Any]) -> Inputs:
    """Return two small input sets."""
    facts = {"batch": 3, "seq_len": 70, "heads": 8, "page_size": 16, **facts}
    return make_inputs(case_of(family, is_ragged=True, **facts), 2, "cpu")


@parametrized
def test_mlagen_is_called_with_the_case(family: str, facts: dict[str, Any]) -> None:
    """The first set gives its reference, and the second another result."""
    inputs = args_of(family, facts)

    call = mlagen_call(inputs)

    expected = attend(inputs)
    assert relative_error(call(0), expected) < 4e-3
    assert relative_error(call(1), expected) > 0.5


def test_an_e4m3_query_gives_bf16() -> None:
    """The output buffer has the dtype of the call's output."""
    inputs = args_of("mla", {"dtype": "e4m3"})

    out = mlagen_call(inputs)(0)

    assert out.dtype is torch.bfloat16
    assert relative_error(out, attend(inputs)) < 5e-2


def test_a_token_too_few_is_found() -> None:
    """An output that misses one token of 70 is far above the error bound."""
    inputs = args_of("mla", {})
    inputs.seq_lens.sub_(1)

    error = relative_error(mlagen_call(inputs)(0), attend(inputs))

    assert error > 4 * inputs.case.error_bound


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mlagen, whose entry points have the same signatures, act as FlashInfer."""
    version = SimpleNamespace(__version__="0.7.2")
    modules = {"flashinfer": version, "flashinfer.mla": mlagen.mla}
    for name, module in {**modules, "flashinfer.decode": mlagen.decode}.items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("flashinfer")
@parametrized
def test_flashinfer_is_called_with_the_case(family: str, facts: dict[str, Any]) -> None:
    """Plan, offsets, pages, lengths and draft masks are those of the case."""
    inputs = args_of(family, facts)

    call = flashinfer_call(inputs, "auto")

    expected = attend(inputs)
    assert relative_error(call(0), expected) < 4e-3
    assert relative_error(call(1), expected) > 0.5


@pytest.mark.usefixtures("flashinfer")
def test_the_backend_is_the_one_that_is_named() -> None:
    """The wrapper receives the name, and rejects an unknown one."""
    with pytest.raises(mlagen.ArgumentError, match="backend: expected"):
        flashinfer_call(args_of("mla", {}), "fa9")


@pytest.mark.usefixtures("flashinfer")
def test_the_version_is_flashinfers_own() -> None:
    """The report has the version of the baseline."""
    assert flashinfer_version() == "0.7.2"


def test_a_draft_attends_to_earlier_drafts() -> None:
    """The mask has one bit per speculative token, in 16-bit words padded to 32 bits."""
    inputs = args_of("gqa", {"q_len": 18})

    mask = _causal_mask(inputs)

    assert (mask.dtype, mask.shape) == (torch.uint16, (3, 18, 2))
    assert mask.int()[2, :2].tolist() == [[1, 0], [3, 0]]
    assert mask.int()[0, 16:].tolist() == [[0xFFFF, 1], [0xFFFF, 3]]
