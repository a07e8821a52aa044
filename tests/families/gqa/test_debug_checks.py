"""Content checks of grouped-query decode with MLAGEN_CHECK=1, message by message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mlagen.errors import CaptureError
from mlagen.settings import current_settings
from tests.families.gqa_rejections import RAGGED, SINGLE, UNIFORM, Rejection, check, rejections
from tests.problems.entry_points import decode_gqa as decode
from tests.problems.gqa import GqaCase
from tests.problems.gqa_cases import CASES


@pytest.fixture(autouse=True)
def _checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()
    yield
    current_settings.cache_clear()


def changed(tensor: torch.Tensor, at: tuple[int, ...], number: int) -> torch.Tensor:
    """Return a copy with one element changed."""
    other = tensor.clone()
    other[at] = number
    return other


def cu_seqlens(*numbers: int) -> torch.Tensor:
    """Return cumulative query lengths."""
    return torch.tensor(numbers, dtype=torch.int32)


@rejections(
    Rejection(
        "a negative length",
        lambda p: {"seq_lens": changed(p.seq_lens, (1,), -2)},
        "seq_lens[1]: expected 0 or more, got -2",
    ),
    Rejection(
        "a length that the table cannot hold",
        lambda p: {"seq_lens": changed(p.seq_lens, (1,), 129)},
        "seq_lens[1]: expected 128 (capacity of its block table) or less, got 129",
    ),
    Rejection(
        "fewer tokens than drafts",
        lambda p: {"seq_lens": changed(p.seq_lens, (1,), 1)},
        "seq_lens[1]: expected 0, or 2 (its query tokens) or more, got 1",
        UNIFORM,
    ),
    Rejection(
        "a page that is none",
        lambda p: {"block_tables": changed(p.block_tables, (0, 4), 10)},
        "block_tables[0, 4]: expected 0 to 9 (pages of the cache), got 10",
    ),
    Rejection(
        "a negative page",
        lambda p: {"block_tables": changed(p.block_tables, (1, 0), -1)},
        "block_tables[1, 0]: expected 0 to 9 (pages of the cache), got -1",
    ),
    Rejection(
        "offsets that do not begin with 0",
        lambda _: {"q_cu_seq_lens": cu_seqlens(1, 2, 5)},
        "q_cu_seq_lens[0]: expected 0, got 1",
        RAGGED,
    ),
    Rejection(
        "tokens that belong to no request",
        lambda _: {"q_cu_seq_lens": cu_seqlens(0, 2, 4)},
        "q_cu_seq_lens[-1]: expected 5 (tokens of query), got 4",
        RAGGED,
    ),
    Rejection(
        "decreasing offsets",
        lambda _: {"q_cu_seq_lens": cu_seqlens(0, 6, 5)},
        "q_cu_seq_lens[2]: expected 6 or more (q_cu_seq_lens[1]), got 5",
        RAGGED,
    ),
    Rejection(
        "a query longer than the longest",
        lambda _: {"q_cu_seq_lens": cu_seqlens(0, 0, 5)},
        "q_cu_seq_lens.diff()[1]: expected 4 (q_len_per_req) or less, got 5",
        RAGGED,
    ),
)
def test_inconsistent_contents_are_rejected(rejection: Rejection) -> None:
    """Messages for inconsistent lengths, tables and offsets name request and index."""
    check(rejection)


# A request shorter than its drafts is computed, but it is not valid.
VALID = [
    case
    for case in CASES[::11]
    if all(
        length >= q_len or length == 0
        for length, q_len in zip(case.seq_lens, case.lens, strict=True)
    )
    and max(case.seq_lens) <= 300
]


@pytest.mark.parametrize("case", VALID, ids=str)
def test_valid_contents_pass(case: GqaCase) -> None:
    """Invalid ids past the end of a request, and empty requests, pass."""
    problem = case.build("cpu")

    out = decode(problem)

    problem.check(out)


def test_unsigned_tables_pass() -> None:
    """A uint32 id is compared as an unsigned number."""
    problem = SINGLE.build("cpu")

    out = decode(problem, block_tables=problem.block_tables.view(torch.uint32))

    problem.check(out)


def test_a_checked_call_is_rejected_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks would wait for the device; nothing is written."""
    monkeypatch.setattr("mlagen.families.common.device_checks.is_capturing", lambda _: True)
    problem = UNIFORM.build("cpu")
    out = torch.full_like(problem.query, 7.0)

    with pytest.raises(CaptureError, match=r"^MLAGEN_CHECK: expected 0 while a CUDA graph"):
        decode(problem, out=out)

    assert (out == 7.0).all()
