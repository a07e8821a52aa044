"""Serialization of masks to a string and tensors, the types of torch op arguments."""

from __future__ import annotations

import torch

from mlagen.errors import UnsupportedError
from mlagen.mla.masks import (
    AndMask,
    CausalMask,
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

_WITHOUT_SIZE = {"null": NullMask, "causal": CausalMask}
_WITH_SIZE = {
    "window": SlidingWindowCausalMask,
    "window_noncausal": SlidingWindowNonCausalMask,
    "chunked": ChunkedMask,
    "chunked_causal": ChunkedCausalMask,
}
_COMBINED = {"or": OrMask, "and": AndMask}


def code_of(mask: Mask, tensors: list[torch.Tensor]) -> str:
    """Return the words of a mask in prefix order, and append its tensors.

    A compiler traces this.

    Raises
    ------
    UnsupportedError
        If the mask is none of :mod:`mlagen.mla`.
    """
    kind = type(mask)
    for word, mask_type in _WITHOUT_SIZE.items():
        if kind is mask_type:
            return word
    for word, sized_type in _WITH_SIZE.items():
        if kind is sized_type:
            is_chunked = word.startswith("chunked")
            return f"{word} {mask.size if is_chunked else mask.window}"  # type: ignore[attr-defined]
    for word, combined in _COMBINED.items():
        if kind is combined:
            return f"{word} {code_of(mask.a, tensors)} {code_of(mask.b, tensors)}"  # type: ignore[attr-defined]
    if isinstance(mask, CausalPaddingMask):
        tensors.append(mask.valid_lengths)
        return "padding"
    if isinstance(mask, MaterializedMask):
        tensors.append(mask.tensor)
        if isinstance(mask.start_pos, torch.Tensor):
            tensors.append(mask.start_pos)
            return "materialized tensor"
        return f"materialized {mask.start_pos}"
    raise UnsupportedError(
        f"mask: expected one of mlagen.mla in compiled code, got {type(mask).__name__}"
    )


def mask_of(code: str, tensors: list[torch.Tensor]) -> Mask:
    """Return the mask of a code from :func:`code_of`."""
    return _next_mask(code.split(), list(tensors))


def _next_mask(words: list[str], tensors: list[torch.Tensor]) -> Mask:
    word = words.pop(0)
    if word in _WITHOUT_SIZE:
        return _WITHOUT_SIZE[word]()
    if word in _WITH_SIZE:
        return _WITH_SIZE[word](int(words.pop(0)))
    if word in _COMBINED:
        first = _next_mask(words, tensors)
        return _COMBINED[word](first, _next_mask(words, tensors))
    tensor = tensors.pop(0)
    if word == "padding":
        return CausalPaddingMask(tensor)
    start = words.pop(0)
    if start == "tensor":
        return MaterializedMask(tensor, tensors.pop(0))
    return MaterializedMask(tensor, None if start == "None" else int(start))
