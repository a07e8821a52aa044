"""Content checks of MLA decode with ``MLAGEN_CHECK=1``, message by message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, CaptureError
from mlagen.families.mla.dispatch import run_mla
from mlagen.settings import current_settings
from tests.problems.mla import MlaCase, MlaProblem

UNIFORM = MlaCase(name="uniform", seq_lens=(70, 2, 0), q_len=2)
RAGGED = MlaCase(name="ragged", seq_lens=(70, 3), q_lens=(1, 3))
FLAT = replace(UNIFORM, name="flat tables", flat_tables=True)
SEPARATE_PAGES = replace(UNIFORM, name="values in other pages", values="other pages")
SPARSE = replace(UNIFORM, name="sparse", top_k=70)
BIASED = replace(UNIFORM, name="a bias", bias="for each head")
NOT_CAUSAL = MlaCase(name="not causal", seq_lens=(1, 0), q_len=4, is_causal=False)


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enable the content checks."""
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()


@pytest.mark.parametrize(
    "case", [UNIFORM, RAGGED, FLAT, SEPARATE_PAGES, SPARSE, BIASED, NOT_CAUSAL], ids=str
)
def test_valid_contents_pass(case: MlaCase) -> None:
    """Elements that no kernel reads are not checked."""
    problem = case.build("cpu")

    out, _ = run_mla(problem.inputs(), enable_pdl=True)

    problem.check(out)


def test_top_k_lengths_replace_sequence_lengths() -> None:
    """With top-k lengths, sequence lengths are neither read nor checked."""
    problem = replace(SPARSE, with_top_k_lens=True).build("cpu")
    wild = torch.tensor([-5, 0, 2**31 - 1], dtype=torch.int32)

    out, _ = run_mla(problem.inputs(seq_lens=wild), enable_pdl=True)

    problem.check(out)


def put(tensor: torch.Tensor | None, *at: int, value: int) -> torch.Tensor:
    """Return a copy with one element changed."""
    assert tensor is not None
    copy = tensor.clone()
    copy[at] = value
    return copy


Change = Callable[[MlaProblem], dict[str, Any]]
REJECTED: dict[str, tuple[MlaCase, Change, str]] = {
    "an invalid page id": (
        UNIFORM,
        lambda p: {"block_tables": put(p.block_tables, 0, 1, value=-1)},
        "block_tables[0, 1]: expected 0 to 6 (pages of the cache), got -1",
    ),
    "an invalid page id of values": (
        SEPARATE_PAGES,
        lambda p: {"block_tables": put(p.block_tables, 1, 1, 0, value=10)},
        "block_tables[1, 0]: expected 0 to 9 (pages of the cache), got 10",
    ),
    "an invalid flat page id": (
        FLAT,
        lambda p: {"block_tables": put(p.block_tables, 2, value=99)},
        "block_tables[2] (request 1, page 0): expected 0 to 6 (pages of the cache), got 99",
    ),
    "a length beyond the table": (
        UNIFORM,
        lambda p: {"seq_lens": put(p.seq_lens, 1, value=321)},
        "seq_lens[1]: expected 320 (capacity of its block table) or less, got 321",
    ),
    "a length beyond its part of the page ids": (
        FLAT,
        lambda p: {"seq_lens": put(p.seq_lens, 1, value=65)},
        "seq_lens[1]: expected 64 (capacity of its block table) or less, got 65",
    ),
    "a length without its new tokens": (
        UNIFORM,
        lambda p: {"seq_lens": put(p.seq_lens, 1, value=1)},
        "seq_lens[1]: expected 0, or 2 (its query tokens) or more, got 1",
    ),
    "decreasing offsets": (
        RAGGED,
        lambda p: {"cum_seq_lens_q": put(p.cum_seq_lens_q, 1, value=5)},
        "cum_seq_lens_q[2]: expected 5 or more (cum_seq_lens_q[1]), got 4",
    ),
    "query tokens that belong to no request": (
        RAGGED,
        lambda p: {"cum_seq_lens_q": put(p.cum_seq_lens_q, 2, value=3)},
        "cum_seq_lens_q[-1]: expected 4 (tokens of query), got 3",
    ),
    "kv_indptr beyond the page ids": (
        FLAT,
        lambda p: {"kv_indptr": put(p.extra_args["kv_indptr"], 3, value=99)},
        "kv_indptr[-1]: expected 11 (page ids) or less, got 99",
    ),
    "a length beyond the bias": (
        BIASED,
        lambda p: {"seq_lens": put(p.seq_lens, 0, value=76)},
        "max(seq_lens): expected 75 (bias) or less, got 76",
    ),
}


@pytest.mark.parametrize(("case", "change", "message"), REJECTED.values(), ids=REJECTED)
def test_inconsistent_contents_are_rejected(case: MlaCase, change: Change, message: str) -> None:
    """The message names request and index, and nothing is written."""
    problem = case.build("cpu")
    shape = (*problem.query.shape[:-1], 512)
    out = torch.full(shape, 7.0, dtype=torch.bfloat16)

    with pytest.raises(ArgumentError) as caught:
        run_mla(problem.inputs(out=out, **change(problem)), enable_pdl=True)

    assert str(caught.value) == message
    assert (out == 7.0).all()


def test_a_checked_call_is_rejected_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks would wait for the device; nothing is written."""
    monkeypatch.setattr("mlagen.families.common.device_checks.is_capturing", lambda _: True)
    problem = UNIFORM.build("cpu")
    out = torch.full((*problem.query.shape[:-1], 512), 7.0, dtype=torch.bfloat16)

    with pytest.raises(CaptureError, match=r"^MLAGEN_CHECK: expected 0 while a CUDA graph"):
        run_mla(problem.inputs(out=out), enable_pdl=True)

    assert (out == 7.0).all()


def test_without_the_variable_contents_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``MLAGEN_CHECK=1`` no content check runs."""
    monkeypatch.delenv("MLAGEN_CHECK")
    current_settings.cache_clear()
    problem = UNIFORM.build("cpu")
    tables = put(problem.block_tables, 0, 1, value=-1)

    out, _ = run_mla(problem.inputs(block_tables=tables), enable_pdl=True)

    assert out.isfinite().all()
