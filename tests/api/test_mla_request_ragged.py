"""Bad ragged queries of MLA decode, message by message."""

from __future__ import annotations

import torch

from tests.api.refusals import RAGGED, Refusal, check, refusals, strided


@refusals(
    Refusal(
        "max_q_len without cum_seq_lens_q",
        lambda _: {"max_q_len": 2},
        "max_q_len: expected None without cum_seq_lens_q, got 2",
    ),
    Refusal(
        "a negative max_q_len",
        lambda _: {"max_q_len": -1},
        "max_q_len: expected an int, 0 or more, got -1",
        RAGGED,
    ),
    Refusal(
        "more tokens than max_q_len allows",
        lambda _: {"max_q_len": 2},
        "query.shape[0]: expected 4 or less (batch * max_q_len), got 5",
        RAGGED,
    ),
    Refusal(
        "a list",
        lambda _: {"cum_seq_lens_q": [0, 1, 5]},
        "cum_seq_lens_q: expected a torch.Tensor, got list",
        RAGGED,
    ),
    Refusal(
        "another device",
        lambda _: {"cum_seq_lens_q": torch.zeros(3, dtype=torch.int32, device="meta")},
        "cum_seq_lens_q.device: expected cpu (of query), got meta",
        RAGGED,
    ),
    Refusal(
        "int64",
        lambda _: {"cum_seq_lens_q": torch.tensor([0, 1, 5])},
        "cum_seq_lens_q.dtype: expected torch.int32 or torch.uint32, got torch.int64",
        RAGGED,
    ),
    Refusal(
        "lengths instead of ends",
        lambda _: {"cum_seq_lens_q": torch.tensor([1, 4], dtype=torch.int32)},
        "cum_seq_lens_q.shape: expected [3] (batch + 1), got [2]",
        RAGGED,
    ),
    Refusal(
        "gaps",
        lambda _: {"cum_seq_lens_q": strided(torch.tensor([0, 1, 5], dtype=torch.int32))},
        "cum_seq_lens_q.stride(): expected contiguous for shape [3], got (2,)",
        RAGGED,
    ),
)
def test_ragged_queries(refusal: Refusal) -> None:
    """The ends of the requests' queries come in one tensor with the longest beside it."""
    check(refusal)


@refusals(
    Refusal(
        "a first end that is not 0",
        lambda _: {"cum_seq_lens_q": torch.tensor([1, 2, 5], dtype=torch.int32)},
        "cum_seq_lens_q[0]: expected 0, got 1",
        RAGGED,
    ),
    Refusal(
        "a last end that is not the last token",
        lambda _: {"cum_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32)},
        "cum_seq_lens_q[-1]: expected 5 (tokens of query), got 4",
        RAGGED,
    ),
    Refusal(
        "ends that go back",
        lambda _: {"cum_seq_lens_q": torch.tensor([0, 6, 5], dtype=torch.int32)},
        "cum_seq_lens_q: expected values that do not decrease, got [0, 6, 5]",
        RAGGED,
    ),
    Refusal(
        "text for a tensor",
        lambda _: {"cum_seq_lens_q": "0 1 5"},
        "cum_seq_lens_q: expected a torch.Tensor, got str",
        RAGGED,
    ),
)
def test_ragged_queries_whose_longest_is_to_be_found(refusal: Refusal) -> None:
    """Without max_q_len the ends are read, and checked."""
    changed = refusal._replace(change=lambda p: refusal.change(p) | {"max_q_len": None})

    check(changed)
