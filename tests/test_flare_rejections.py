"""What flare_mla_decoding rejects: arguments, masks, and lengths with MLAGEN_CHECK=1."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": bf16(11, 1, 6, 576)}, "q.ndim: expected 3, got 4"),
        ({"ragged": False}, "q.ndim: expected 4, got 3"),
        ({"q": bf16(11, 6, 512)}, "q.shape[-1]: expected 576"),
        (
            {"q": bf16(11, 257, 576), "output": None},
            "q.shape[-2]: expected 1 to 256 heads, got 257",
        ),
        ({"q": torch.zeros(11, 6, 576)}, "q.dtype: expected torch.bfloat16 or"),
        ({"q": bf16(11, 6, 576).half()}, "k.blocks.dtype: expected torch.float16"),
        ({"mask": "causal"}, "mask: expected a mask of mlagen.mla, got str"),
        ({"num_partitions": 0}, "num_partitions: expected an int, 1 or more, got 0"),
        ({"scale": "1"}, "scale: expected a float"),
        ({"valid_length": None}, "valid_length: expected a torch.Tensor, got NoneType"),
        (
            {"valid_length": ints(*range(6))},
            "valid_length.shape: expected [7] (batch of k + 1",
        ),
        ({"valid_length": torch.zeros(7)}, "valid_length.dtype: expected torch.int32"),
        ({"valid_length": ints(*range(14))[::2]}, "valid_length must be contiguous"),
        ({"output": bf16(11, 6, 576)}, "output.shape: expected [11, 6, 512], got"),
        ({"output": bf16(6, 11, 512).mT}, "output.shape: expected [11, 6, 512], got"),
        ({"output": bf16(6, 11, 512).transpose(0, 1)}, "output must be contiguous"),
        ({"output": torch.zeros(11, 6, 512)}, "output.dtype: expected torch.bfloat16"),
        ({"q_scale": torch.ones(11)}, "q_scale: expected None without 640-byte rows"),
        ({"q_scale": torch.ones(11).half()}, "q_scale.dtype: expected torch.float32"),
        ({"kv_scales": torch.ones(1)}, "kv_scales: expected None with a PagedKVCache"),
        (
            {"per_token_scale_rope_aware": True} | cache(scales=torch.ones(40, 16)),
            "q.dtype: expected torch.float8_e4m3fn or",
        ),
        (
            {"per_token_scale_rope_aware": True, "q": torch.zeros(11, 6, 640).to(E4M3)}
            | cache(blocks=torch.zeros(40, 16, 640).to(E4M3)),
            "k.scales: expected a tensor with per_token_scale_rope_aware, got None",
        ),
        (cache(blocks=bf16(9, 576)), "k.blocks.ndim: expected 3 or 4, got 2"),
        (cache(blocks=bf16(9, 2, 16, 576)), "k.blocks.shape: expected [pages, 1, page_size"),
        (cache(blocks=bf16(9, 16, 512)), "k.blocks.shape[-1]: expected 576"),
        (cache(blocks=bf16(9, 16, 576).to("meta")), "k.block_table.device: expected meta"),
        (cache(block_table=ints(1, 2)), "k.block_table.ndim: expected 2, got 1"),
        (cache(block_table=ints(1)[None].long()), "k.block_table.dtype: expected torch.int32"),
        (cache(cache_lengths=ints(1, 2)), "k.cache_lengths.shape: expected [6] (batch of"),
        (cache(cache_lengths=torch.zeros(6)), "k.cache_lengths.dtype: expected torch.int32"),
        (cache(scales=torch.ones(3)), "k.scales.ndim: expected 2, got 1"),
        ({**DENSE, "k": bf16(6, 9, 576)}, "k.ndim: expected 4, got 3"),
        ({**DENSE, "k": bf16(6, 9, 2, 576)}, "k.shape[2]: expected 1 (KV heads), got 2"),
        ({**DENSE, "k": bf16(5, 9, 1, 576)}, "q.shape[0]: expected 5 (batch of k), got 6"),
        ({**DENSE, "k": bf16(6, 9, 1, 576).to("meta")}, "k.device: expected cpu"),
        ({**DENSE, "kv_scales": torch.ones(6, 8)}, "kv_scales.shape: expected [6, 9]"),
        ({**DENSE, "valid_length": ints(1)}, "valid_length.shape: expected [6] (batch of q"),
        (
            {**DENSE, "k": bf16(0, 9, 1, 576), "q": bf16(3, 6, 576)}
            | {"ragged": True, "valid_length": ints(0)},
            "q.shape[0]: expected 0 (no requests), got 3",
        ),
    ],
)
def test_invalid_arguments_are_rejected(changes: dict[str, Any], message: str) -> None:
    """The error has argument, rule and value, and nothing is written."""
    output = RAGGED.new_out(7.0)
    valid = VALID | {"output": None if "k" in changes and "q" in changes else output}

    with pytest.raises(ArgumentError, match=re.escape(message)):
        flare_mla_decoding(**valid | changes)

    assert (output == 7.0).all()


def test_keys_of_the_wrong_kind_are_rejected() -> None:
    """Keys are a tensor or a cache."""
    with pytest.raises(ArgumentError, match="k: expected a "):
        flare_mla_decoding(bf16(1, 1, 6, 576), [], NullMask(), None, 1.0)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (CausalPaddingMask(ints(1, 2)), r"mask.valid_lengths.shape: expected \[6\] \(batch\)"),
        (CausalPaddingMask(torch.zeros(6)), "mask.valid_lengths.dtype: expected torch.int32"),
        (MaterializedMask(bf16(6, 5)), "mask.tensor.ndim: expected 3 or 4, got 2"),
        (MaterializedMask(bf16(5, 5, 5)), r"mask.tensor.shape: expected \[6, 5, 5\] or \[6, 6, 5"),
        (MaterializedMask(bf16(6, 2, 5, 5)), r"mask.tensor.shape: expected \[6, 5, 5\] or"),
        (MaterializedMask(bf16(6, 0, 5)), "mask.tensor.shape: expected 1 or more of each"),
        (MaterializedMask(torch.ones(6, 5, 5).bool()), "mask.tensor.dtype: expected a dtype of"),
        (MaterializedMask(bf16(6, 5, 5), start_pos=-1), "mask.start_pos: expected an int, 0 or"),
        (MaterializedMask(bf16(6, 5, 5), start_pos=2**70), "mask.start_pos: expected 2147483647"),
        (Mask(), "mask: expected a mask that defines attends or bias, got Mask, which has neither"),
        (MaterializedMask(bf16(6, 5, 5), start_pos=ints(1)), r"mask.start_pos.shape: expected \[6"),
        (OrMask(NullMask(), "x"), "mask.b: expected a mask, got str"),  # type: ignore[arg-type]
        (AndMask(None, NullMask()), "mask.a: expected a mask, got None"),  # type: ignore[arg-type]
    ],
)
def test_a_mask_that_does_not_fit_is_rejected(mask: Mask, message: str) -> None:
    """The error has the field of the mask."""
    with pytest.raises(ArgumentError, match=message):
        flare_mla_decoding(**VALID | {"mask": mask})


PADDED = {"q": bf16(6, 2, 6, 576), "ragged": False}
TWO_EACH = PADDED | {"valid_length": ints(*[2] * 6)}
LENGTHS = ints(1, 1, -1, 1, 1, 1)
CARRIED = "(capacity of its block table) or less with its new tokens"
NEGATIVE = "k.cache_lengths[2]: expected 0 or more, got -1"
FULL = {"block_table": torch.zeros(6, 5).int(), "cache_lengths": ints(0, 79, 0, 0, 0, 0)}
CONTENTS: dict[str, tuple[dict[str, Any], str]] = {
    "a negative length": (cache(cache_lengths=LENGTHS) | TWO_EACH, NEGATIVE),
    "a negative length of a ragged request": (cache(cache_lengths=LENGTHS), NEGATIVE),
    "fewer query tokens than none": (
        PADDED | {"valid_length": ints(2, -1, 2, 2, 2, 2)},
        "valid_length[1]: expected 0 to 2 (q.shape[1]), got -1",
    ),
    "more query tokens than there are": (
        PADDED | {"valid_length": ints(2, 2, 2, 2, 2, 3)},
        "valid_length[5]: expected 0 to 2 (q.shape[1]), got 3",
    ),
    "a length that only its new tokens carry past the table": (
        cache(**FULL) | TWO_EACH,
        f"k.cache_lengths[1]: expected 80 {CARRIED}, got 81",
    ),
}


@pytest.mark.parametrize(("changes", "message"), CONTENTS.values(), ids=CONTENTS)
def test_invalid_lengths_are_rejected_with_content_checks(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MLAGEN_CHECK=1 the message has the caller's tensor and the request."""
    flare_mla_decoding(**VALID | changes)
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with pytest.raises(ArgumentError) as caught:
        flare_mla_decoding(**VALID | changes)

    assert str(caught.value) == message
