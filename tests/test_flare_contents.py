"""Length checks of flare_mla_decoding with MLAGEN_CHECK=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.mla.flare import PagedKVCache, flare_mla_decoding
from mlagen.mla.masks import NullMask
from mlagen.settings import current_settings
from tests.flare_problems import RAGGED, cached_lengths


def ints(*numbers: int) -> torch.Tensor:
    """Return int32 numbers."""
    return torch.tensor(numbers, dtype=torch.int32)


def cache(**changes: Any) -> dict[str, Any]:
    """Return a cache of six requests, with some fields replaced."""
    problem = RAGGED.build("cpu")
    parts = {
        "blocks": problem.kv_cache,
        "block_table": problem.block_tables,
        "cache_lengths": cached_lengths(problem),
    }
    return {"k": PagedKVCache(**parts | changes)}


CARRIED = "(capacity of its block table) or less with its new tokens"
PADDED = {"q": torch.zeros(6, 2, 6, 576, dtype=torch.bfloat16), "ragged": False}
CONTENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a negative length": (
        cache(cache_lengths=ints(1, 1, -1, 1, 1, 1)) | PADDED | {"valid_length": ints(*[2] * 6)},
        "k.cache_lengths[2]: expected 0 or more, got -1",
    ),
    "a negative length of a ragged request": (
        cache(cache_lengths=ints(1, 1, -1, 1, 1, 1)),
        "k.cache_lengths[2]: expected 0 or more, got -1",
    ),
    "fewer query tokens than none": (
        PADDED | {"valid_length": ints(2, -1, 2, 2, 2, 2)},
        "valid_length[1]: expected 0 to 2 (q.shape[1]), got -1",
    ),
    "more query tokens than there are": (
        PADDED | {"valid_length": ints(2, 2, 2, 2, 2, 3)},
        "valid_length[5]: expected 0 to 2 (q.shape[1]), got 3",
    ),
    "a length that only its new tokens carry past the table": (
        cache(cache_lengths=ints(0, 79, 0, 0, 0, 0), block_table=torch.zeros(6, 5).int())
        | PADDED
        | {"valid_length": ints(*[2] * 6)},
        f"k.cache_lengths[1]: expected 80 {CARRIED}, got 81",
    ),
}


@pytest.mark.parametrize(("changes", "message"), CONTENTS.values(), ids=CONTENTS)
def test_invalid_lengths_are_rejected_with_content_checks(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLAGEN_CHECK=1 the message has the caller's tensor and the request."""
    problem = RAGGED.build("cpu")
    arguments: dict[str, Any] = cache() | {
        "q": problem.query,
        "mask": NullMask(),
        "valid_length": problem.cum_seq_lens_q,
        "scale": 1.0,
        "ragged": True,
    }
    flare_mla_decoding(**arguments | changes)
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with pytest.raises(ArgumentError) as caught:
        flare_mla_decoding(**arguments | changes)

    assert str(caught.value) == message
