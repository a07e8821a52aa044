"""Checks of tensor contents, message by message."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mlagen.errors import ArgumentError, CaptureError
from mlagen.families.common import device_checks as checks


def ints(*numbers: int) -> torch.Tensor:
    """Return an int32 tensor."""
    return torch.tensor(numbers, dtype=torch.int32)


LENGTHS = torch.tensor([5, 0, 64])
TABLES = torch.tensor([[3, -1], [-1, 99], [0, 99]], dtype=torch.int32)


def check_tables(tables: torch.Tensor) -> None:
    """Check tables of pages of 64 tokens for :data:`LENGTHS`."""
    checks.check_page_ids(tables, "x", seq_lens=LENGTHS, page_size=64, num_pages=4)


def check_flat(page_ids: torch.Tensor) -> None:
    """Check the same ids as a flat table."""
    starts = ints(0, 1, 1, 2)
    checks.check_flat_page_ids(
        page_ids, "x", kv_indptr=starts, seq_lens=LENGTHS, page_size=64, num_pages=4
    )


REJECTED: dict[str, tuple[Callable[[], object], str]] = {
    "a first end that is not 0": (
        lambda: checks.query_lengths(ints(1, 2, 5), "x", 5),
        "x[0]: expected 0, got 1",
    ),
    "a last end that is not the last token": (
        lambda: checks.query_lengths(ints(0, 2, 4), "x", 5),
        "x[-1]: expected 5 (tokens of query), got 4",
    ),
    "decreasing offsets": (
        lambda: checks.query_lengths(ints(0, 6, 5), "x", 5),
        "x[2]: expected 6 or more (x[1]), got 5",
    ),
    "a negative length": (
        lambda: checks.check_seq_lens(ints(5, -1), "x", capacity=None, q_lens=None),
        "x[1]: expected 0 or more, got -1",
    ),
    "a length beyond every table": (
        lambda: checks.check_seq_lens(ints(64, 65), "x", capacity=64, q_lens=None),
        "x[1]: expected 64 (capacity of its block table) or less, got 65",
    ),
    "a length beyond its own table": (
        lambda: checks.check_seq_lens(
            ints(65, 65), "x", capacity=torch.tensor([128, 64]), q_lens=None
        ),
        "x[1]: expected 64 (capacity of its block table) or less, got 65",
    ),
    "a length without its new tokens": (
        lambda: checks.check_seq_lens(ints(4, 3), "x", capacity=None, q_lens=torch.tensor([4, 4])),
        "x[1]: expected 0, or 4 (its query tokens) or more, got 3",
    ),
    "a page id that is negative": (
        lambda: check_tables(torch.tensor([[-1, 0], [0, 0], [0, 0]])),
        "x[0, 0]: expected 0 to 3 (pages of the cache), got -1",
    ),
    "a page id past the cache": (
        lambda: check_tables(torch.tensor([[0, 0], [0, 0], [4, 0]])),
        "x[2, 0]: expected 0 to 3 (pages of the cache), got 4",
    ),
    "a page id in a row past the cache": (
        lambda: check_flat(ints(3, 4, -1)),
        "x[1] (request 2, page 0): expected 0 to 3 (pages of the cache), got 4",
    ),
    "a place before the first page id": (
        lambda: checks.table_capacity(ints(-1, 2), "x", page_ids=2, page_size=64),
        "x[0]: expected 0 or more, got -1",
    ),
    "a place past the last page id": (
        lambda: checks.table_capacity(ints(0, 3), "x", page_ids=2, page_size=64),
        "x[-1]: expected 2 (page ids) or less, got 3",
    ),
    "decreasing kv_indptr": (
        lambda: checks.table_capacity(ints(0, 2, 1), "x", page_ids=2, page_size=64),
        "x[2]: expected 2 or more (x[1]), got 1",
    ),
}


@pytest.mark.parametrize(("check", "message"), REJECTED.values(), ids=REJECTED)
def test_inconsistent_contents_are_rejected(check: Callable[[], object], message: str) -> None:
    """The message names index, rule and value."""
    with pytest.raises(ArgumentError) as caught:
        check()

    assert str(caught.value) == message


PASSING: dict[str, Callable[[], object]] = {
    "unused invalid ids": lambda: check_tables(TABLES),
    "unused invalid flat ids": lambda: check_flat(ints(3, 0, -1)),
    "padding: an empty request with a query": lambda: checks.check_seq_lens(
        ints(0, 4), "x", capacity=4, q_lens=torch.tensor([4, 4])
    ),
    "no requests": lambda: checks.check_seq_lens(ints(), "x", capacity=0, q_lens=None),
    "unsigned lengths": lambda: checks.check_seq_lens(
        ints(3).view(torch.uint32), "x", capacity=4, q_lens=None
    ),
    "a tensor without a capture": lambda: checks.require_no_capture(LENGTHS),
}


@pytest.mark.parametrize("check", PASSING.values(), ids=PASSING)
def test_valid_contents_pass(check: Callable[[], object]) -> None:
    """Elements that no kernel reads are not checked."""
    returned = check()

    assert returned is None or isinstance(returned, torch.Tensor)


def test_offsets_give_the_query_tokens_of_each_request() -> None:
    """The differences of cumulative query lengths may be zero."""
    lengths = checks.query_lengths(ints(0, 2, 2, 5), "x", 5)

    assert lengths.tolist() == [2, 0, 3]


def test_kv_indptr_gives_the_capacity_of_each_table() -> None:
    """The capacity is in tokens, up to the next request's page ids."""
    capacity = checks.table_capacity(ints(0, 2, 2, 3), "x", page_ids=9, page_size=16)

    assert capacity.tolist() == [32, 0, 16]


class Captured(torch.Tensor):
    """A tensor that reports the second GPU as its device."""

    device = torch.device("cuda", 1)


def test_checks_are_rejected_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check queries the tensor's GPU, and the message names the variable."""
    monkeypatch.setattr(checks, "is_capturing", lambda device: device.index == 1)

    with pytest.raises(CaptureError) as caught:
        checks.require_no_capture(torch.zeros(1).as_subclass(Captured))

    assert str(caught.value) == (
        "MLAGEN_CHECK: expected 0 while a CUDA graph is captured, got 1; its checks would wait for "
        "the device"
    )
