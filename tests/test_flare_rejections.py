"""What flare_mla_decoding rejects: arguments, masks, and lengths with MLAGEN_CHECK=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.mla.flare import PagedKVCache, flare_mla_decoding
from mlagen.mla.masks import (
    AndMask,
    CausalPaddingMask,
    ChunkedCausalMask,
    ChunkedMask,
    Mask,
    MaterializedMask,
    NullMask,
    OrMask,
    SlidingWindowCausalMask,
    SlidingWindowNonCausalMask,
)
from mlagen.settings import current_settings
from tests.problems.flare import cached_lengths, flare_case
from tests.problems.problem import E4M3, bf16, ints
from tests.rejected import Row, rejections, rejections_of, rejects

RAGGED = flare_case().build("cpu")


def cache(**changes: Any) -> dict[str, Any]:
    """Return the cache of six sequences, with some fields replaced."""
    parts = {
        "blocks": RAGGED.kv_cache,
        "block_table": RAGGED.block_tables,
        "cache_lengths": cached_lengths(RAGGED),
    }
    return {"k": PagedKVCache(**parts | changes)}


VALID: dict[str, Any] = cache() | {
    "q": RAGGED.query,
    "mask": NullMask(),
    "valid_length": RAGGED.cum_seq_lens_q,
    "scale": 1.0,
    "ragged": True,
}
DENSE = {"k": bf16(6, 9, 1, 576), "q": bf16(6, 2, 6, 576), "ragged": False, "valid_length": None}
AWARE = {"per_token_scale_rope_aware": True}
PACKED = torch.zeros(40, 16, 640).to(E4M3)
NO_REQUESTS = {
    "k": bf16(0, 9, 1, 576),
    "q": bf16(3, 6, 576),
    "ragged": True,
    "valid_length": ints(0),
}
ROWS: dict[str, list[Row]] = {
    "paged": [
        ("q", bf16(11, 1, 6, 576), ".ndim: expected 3, got 4"),
        ("", {"ragged": False}, "q.ndim: expected 4, got 3"),
        ("q", bf16(11, 6, 512), ".shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim), ..."),
        ("q", {"q": bf16(11, 257, 576), "output": None}, ".shape[-2]: expected 1 to 256 ..."),
        ("q", torch.zeros(11, 6, 576), ".dtype: expected torch.bfloat16 or torch.float16 or ..."),
        ("", {"q": bf16(11, 6, 576).half()}, "k.blocks.dtype: expected torch.float16 or ..."),
        ("mask", "causal", ": expected a mask of mlagen.mla, got str"),
        ("mask", Mask(), ": expected a mask that defines attends or bias, got Mask, which ..."),
        ("num_partitions", 0, ": expected an int, 1 or more, got 0"),
        ("scale", "1", ": expected a float or a torch.float32 tensor of one element, got '1'"),
        ("valid_length", None, ": expected a torch.Tensor, got NoneType"),
        ("valid_length", ints(*range(6)), ".shape: expected [7] (batch of k + 1), got [6]"),
        ("valid_length", torch.zeros(7), ".dtype: expected torch.int32 or torch.uint32, got ..."),
        ("valid_length", ints(*range(14))[::2], " must be contiguous: expected no gaps in ..."),
        ("output", bf16(11, 6, 576), ".shape: expected [11, 6, 512], got [11, 6, 576]"),
        ("output", bf16(6, 11, 512).mT, ".shape: expected [11, 6, 512], got [6, 512, 11]"),
        ("output", bf16(6, 11, 512).transpose(0, 1), " must be contiguous: expected no gaps ..."),
        ("output", torch.zeros(11, 6, 512), ".dtype: expected torch.bfloat16 (dtype of q), ..."),
        ("q_scale", torch.ones(11), ": expected None without 640-byte rows, got a tensor"),
        ("q_scale", torch.ones(11).half(), ".dtype: expected torch.float32, got torch.float16"),
        ("kv_scales", torch.ones(1), ": expected None with a PagedKVCache, which has scales, ..."),
        ("", AWARE | cache(scales=torch.ones(40, 16)), "q.dtype: expected torch.float8_e4m3fn ..."),
        (
            *("k.scales", AWARE | {"q": PACKED[:11, :6]} | cache(blocks=PACKED)),
            ": expected a tensor with per_token_scale_rope_aware, got None",
        ),
    ],
    "cache": [
        ("blocks", bf16(9, 576), ".ndim: expected 3 or 4, got 2"),
        ("blocks", bf16(9, 2, 16, 576), ".shape: expected [pages, 1, page_size..."),
        ("blocks", bf16(9, 16, 512), ".shape[-1]: expected 576 (kv_lora_rank ..."),
        ("", {"blocks": bf16(9, 16, 576).to("meta")}, "block_table.device: expected meta ..."),
        ("block_table", ints(1, 2), ".ndim: expected 2, got 1"),
        ("block_table", ints(1)[None].long(), ".dtype: expected torch.int32..."),
        ("cache_lengths", ints(1, 2), ".shape: expected [6] (batch of ..."),
        ("cache_lengths", torch.zeros(6), ".dtype: expected torch.int32..."),
        ("scales", torch.ones(3), ".ndim: expected 2, got 1"),
    ],
    "dense": [
        ("k", bf16(6, 9, 576), ".ndim: expected 4, got 3"),
        ("k", bf16(6, 9, 2, 576), ".shape[2]: expected 1 (KV heads), got 2"),
        ("", {"k": bf16(5, 9, 1, 576)}, "q.shape[0]: expected 5 (batch of k), got 6"),
        ("k", bf16(6, 9, 1, 576).to("meta"), ".device: expected cpu (of ..."),
        ("kv_scales", torch.ones(6, 8), ".shape: expected [6, 9] ..."),
        ("valid_length", ints(1), ".shape: expected [6] (batch of q..."),
        ("q", NO_REQUESTS, ".shape[0]: expected 0 (no requests), got 3"),
        ("k", [], ": expected a ..."),
    ],
    "mask": [
        ("valid_lengths", CausalPaddingMask(ints(1, 2)), ".shape: expected [6] (batch), ..."),
        ("valid_lengths", CausalPaddingMask(torch.zeros(6)), ".dtype: expected torch.int32..."),
        ("tensor", MaterializedMask(bf16(6, 5)), ".ndim: expected 3 or 4, got 2"),
        ("tensor", MaterializedMask(bf16(5, 5, 5)), ".shape: expected [6, 5, 5] or [6, 6, 5..."),
        ("tensor", MaterializedMask(bf16(6, 2, 5, 5)), ".shape: expected [6, 5, 5] or ..."),
        ("tensor", MaterializedMask(bf16(6, 0, 5)), ".shape: expected 1 or more of each, ..."),
        ("tensor", MaterializedMask(bf16(6, 5, 5).bool()), ".dtype: expected a dtype of..."),
        ("start_pos", MaterializedMask(bf16(6, 5, 5), start_pos=-1), ": expected an int, 0 or..."),
        ("start_pos", MaterializedMask(bf16(6, 5, 5), start_pos=2**70), ": expected 2147483647..."),
        ("start_pos", MaterializedMask(bf16(6, 5, 5), start_pos=ints(1)), ".shape: expected [6..."),
        ("b", OrMask(NullMask(), "x"), ": expected a mask, got str"),  # type: ignore[arg-type]
        ("a", AndMask(None, NullMask()), ": expected a mask, got NoneType"),  # type: ignore[arg-type]
    ],
}


@rejections_of(ROWS)
def test_a_call_is_rejected(call: str, changes: dict[str, Any], message: str) -> None:
    """The error has argument, rule and value, and nothing is written."""
    output = RAGGED.new_out(7.0)
    valid = VALID | {"output": output}
    match call:
        case "cache":
            message, changes = f"k.{message}", cache(**changes)
        case "mask":
            (mask,) = changes.values()
            message, changes = f"mask.{message}", {"mask": mask}
        case "dense":
            valid = VALID | DENSE

    with rejects(message):
        flare_mla_decoding(**valid | changes)

    assert (output == 7.0).all()


@pytest.mark.parametrize(
    "mask",
    [SlidingWindowCausalMask, SlidingWindowNonCausalMask, ChunkedMask, ChunkedCausalMask],
    ids=lambda mask: mask.__name__,
)
def test_a_mask_of_an_invalid_size_is_rejected(mask: type[ChunkedMask]) -> None:
    """Windows and chunks have one token or more, and compare by size."""
    assert mask(3) == mask(3) != mask(4)
    for size in (0, -1, 2.0, True):
        with pytest.raises(ArgumentError, match=": expected an int, 1 or more, got"):
            mask(size)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=": expected 2147483647 or less, got 1180591620717"):
        mask(2**70)


def test_the_masks_of_two_masks_are_made_by_name() -> None:
    """Their fields have Modular's names."""
    first, second = NullMask(), SlidingWindowCausalMask(3)

    made = [kind(a=first, b=second) for kind in (OrMask, AndMask)]

    assert [(mask.a, mask.b) for mask in made] == [(first, second)] * 2


PADDED = {"q": bf16(6, 2, 6, 576), "ragged": False}
TWO_EACH = PADDED | {"valid_length": ints(*[2] * 6)}

FEWER = PADDED | {"valid_length": ints(2, -1, 2, 2, 2, 2)}
MORE = PADDED | {"valid_length": ints(2, 2, 2, 2, 2, 3)}
NEGATIVE = cache(cache_lengths=ints(1, 1, -1, 1, 1, 1))
FULL = cache(block_table=torch.zeros(6, 5).int(), cache_lengths=ints(0, 79, 0, 0, 0, 0))


@rejections(
    [
        ("k.cache_lengths[2]", NEGATIVE | TWO_EACH, ": expected 0 or more, got -1"),
        ("k.cache_lengths[2]", NEGATIVE, ": expected 0 or more, got -1"),
        ("valid_length[1]", FEWER, ": expected 0 to 2 (q.shape[1]), got -1"),
        ("valid_length[5]", MORE, ": expected 0 to 2 (q.shape[1]), got 3"),
        (
            *("k.cache_lengths[1]", FULL | TWO_EACH),
            ": expected 80 (capacity of its block table) or less with its new tokens, got 81",
        ),
    ]
)
def test_invalid_lengths_are_rejected_with_content_checks(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLAGEN_CHECK=1 the message has the caller's tensor and the request."""
    flare_mla_decoding(**VALID | changes)
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with rejects(message):
        flare_mla_decoding(**VALID | changes)
