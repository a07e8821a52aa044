"""Masks of :func:`mlagen.mla.flare.flare_mla_decoding`, and their materialization as a bias.

A query token is at position ``Q`` of its request; the first new token follows the cached ones.
:class:`OrMask` and :class:`AndMask`, with Modular's names, combine masked positions: a token is
masked if either mask masks it, or if both do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    reject,
    require,
    require_device,
    require_dims,
    require_index,
    require_shape,
    require_tensor,
    require_whole_number,
)


class QueryRows(NamedTuple):
    """The query tokens of a call, as input of a mask."""

    requests: torch.Tensor  # int64 [tokens], the request of each token
    positions: torch.Tensor  # int64 [tokens], the position of each token in its request
    batch: int
    heads: int
    width: int  # key positions of the bias


class Mask:
    """The tokens of its request that a query token attends to."""

    parts: ClassVar[tuple[str, ...]] = ()  # fields, for an op: numbers, tensors and masks
    sizes: ClassVar[tuple[str, ...]] = ()  # those of them that are ints, 1 or more

    def __post_init__(self) -> None:
        """Convert the sizes."""
        for name in self.sizes:
            size = require_whole_number(getattr(self, name), name, min_value=1)
            object.__setattr__(self, name, size)

    def bias(self, rows: QueryRows) -> torch.Tensor:
        """Return the bias of the scores, fp32 ``[tokens, heads or 1, width]``."""
        keys = torch.arange(rows.width, dtype=torch.int64, device=rows.positions.device)
        is_attended = self.attends(rows, keys)
        bias = torch.zeros_like(is_attended, dtype=torch.float32)
        return bias.masked_fill_(~is_attended, -math.inf)[:, None]

    def attends(
        self,
        rows: QueryRows,  # noqa: ARG002 - subclasses use it
        keys: torch.Tensor,  # noqa: ARG002 - likewise
    ) -> torch.Tensor:
        """Return whether each token attends to ``keys[width]``, bool ``[tokens, width]``."""
        rule = "a mask that defines attends or bias"
        reject("mask", rule, f"{type(self).__name__}, which has neither")


@dataclass(frozen=True)
class NullMask(Mask):
    """All tokens of the request are unmasked."""

    def attends(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return True for all positions."""
        return keys >= torch.zeros_like(rows.positions)[:, None]


@dataclass(frozen=True)
class CausalMask(Mask):
    """The tokens up to ``Q`` are unmasked."""

    def attends(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return True up to ``Q``."""
        return keys <= rows.positions[:, None]


@dataclass(frozen=True)
class SlidingWindowCausalMask(Mask):
    """The last ``window`` tokens up to and including ``Q`` are unmasked."""

    parts = sizes = ("window",)
    window: int

    def attends(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return True from ``Q - window + 1`` to ``Q``."""
        positions = rows.positions[:, None]
        return (keys <= positions) & (keys > positions - self.window)


@dataclass(frozen=True)
class SlidingWindowNonCausalMask(Mask):
    """The tokens after ``Q - window`` are unmasked, including those after ``Q``."""

    parts = sizes = ("window",)
    window: int

    def attends(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return True from ``Q - window + 1`` on."""
        return keys > rows.positions[:, None] - self.window


@dataclass(frozen=True)
class ChunkedMask(Mask):
    """The tokens in the chunk of ``size`` of ``Q`` are unmasked, including those after ``Q``."""

    parts = sizes = ("size",)
    size: int

    def attends(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return True in the chunk of ``Q``."""
        return keys // self.size == (rows.positions // self.size)[:, None]


@dataclass(frozen=True)
class ChunkedCausalMask(ChunkedMask):
    """The tokens in the chunk of ``size`` of ``Q`` are unmasked, up to ``Q``."""

    def attends(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return True in the chunk of ``Q``, up to ``Q``."""
        return super().attends(rows, keys) & (keys <= rows.positions[:, None])


@dataclass(frozen=True, eq=False)
class CausalPaddingMask(Mask):
    """The tokens up to ``Q`` are unmasked, among the first ``valid_lengths`` of a request.

    ``valid_lengths`` is int32 or uint32 ``[batch]``.
    """

    parts = ("valid_lengths",)
    valid_lengths: torch.Tensor

    def attends(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return True up to ``Q``, except for padding."""
        name = "mask.valid_lengths"
        lengths = require_tensor(self.valid_lengths, name)
        require_index(lengths, name, rows.positions.device)
        require_shape(lengths, name, ((rows.batch,),), "batch")
        valid = lengths.view(torch.int32)[rows.requests][:, None]
        return (keys <= rows.positions[:, None]) & (keys < valid)


@dataclass(frozen=True, eq=False)
class MaterializedMask(Mask):
    """A bias tensor is added to the scaled scores; positions outside the tensor are masked.

    ``tensor`` holds floats, ``[batch, queries, keys]`` or ``[batch, heads, queries, keys]``; the
    row of a token is ``Q - start_pos``. ``start_pos`` is an int, or int32 or uint32 ``[batch]``;
    None means ``keys - queries``. Minus infinity masks a position.
    """

    parts = ("tensor", "start_pos")
    tensor: torch.Tensor
    start_pos: int | torch.Tensor | None = None

    def bias(self, rows: QueryRows) -> torch.Tensor:
        """Return the rows of the tensor."""
        tensor = self._checked(rows)
        queries, keys = tensor.shape[2:]
        row = rows.positions - self._start(rows, keys - queries)
        is_inside = (row >= 0) & (row < queries)
        bias = tensor[rows.requests, :, row.clamp(0, queries - 1), : rows.width].float()
        bias = torch.where(is_inside[:, None, None], bias, -math.inf)
        return torch.nn.functional.pad(bias, (0, max(0, rows.width - keys)), value=-math.inf)

    def _checked(self, rows: QueryRows) -> torch.Tensor:
        """Return the tensor with an axis of heads."""
        name = "mask.tensor"
        tensor = require_tensor(self.tensor, name)
        require_device(tensor, name, rows.positions.device)
        require(tensor.is_floating_point(), f"{name}.dtype", "a dtype of floats", tensor.dtype)
        require_dims(tensor, name, (3, 4))
        queries, keys = tensor.shape[-2:]
        require(queries > 0 and keys > 0, f"{name}.shape", "1 or more of each", list(tensor.shape))
        allowed = ((rows.batch, queries, keys), (rows.batch, rows.heads, queries, keys))
        require_shape(tensor, name, allowed, "batch, heads or none, queries, keys")
        return tensor if tensor.dim() == 4 else tensor[:, None]

    def _start(self, rows: QueryRows, default: int) -> int | torch.Tensor:
        if self.start_pos is None:
            return default
        if not isinstance(self.start_pos, torch.Tensor):
            return require_whole_number(self.start_pos, "mask.start_pos")
        require_index(self.start_pos, "mask.start_pos", rows.positions.device)
        require_shape(self.start_pos, "mask.start_pos", ((rows.batch,),), "batch")
        return self.start_pos.view(torch.int32)[rows.requests]


@dataclass(frozen=True, eq=False)
class OrMask(Mask):
    """A token is masked if either mask masks it; finite biases add up."""

    parts = ("a", "b")
    a: Mask
    b: Mask

    def bias(self, rows: QueryRows) -> torch.Tensor:
        """Return the sum of both."""
        a, b = _both(self, rows)
        is_masked = (a == -math.inf) | (b == -math.inf)
        return torch.where(is_masked, -math.inf, a + b)  # a masked bias may be NaN


@dataclass(frozen=True, eq=False)
class AndMask(Mask):
    """A token is masked if both masks mask it; the larger of both biases counts."""

    parts = ("a", "b")
    a: Mask
    b: Mask

    def bias(self, rows: QueryRows) -> torch.Tensor:
        """Return the larger of both."""
        return torch.maximum(*_both(self, rows))


def _both(mask: OrMask | AndMask, rows: QueryRows) -> tuple[torch.Tensor, torch.Tensor]:
    for name in ("a", "b"):
        part = getattr(mask, name)
        require(isinstance(part, Mask), f"mask.{name}", "a mask", type(part).__name__)
    return mask.a.bias(rows), mask.b.bias(rows)


def empty_bias(mask: Mask, q: torch.Tensor, batch: int) -> torch.Tensor:
    """Check a mask, and return a bias of width 0."""
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    heads = q.shape[-2]
    mask.bias(QueryRows(requests=none, positions=none, batch=batch, heads=heads, width=0))
    tokens = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    return torch.empty((tokens, 1, 0), dtype=torch.float32, device=q.device)


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(NullMask, CausalMask, SlidingWindowCausalMask, SlidingWindowNonCausalMask, ChunkedMask),
        *(ChunkedCausalMask, CausalPaddingMask, MaterializedMask, OrMask, AndMask),
    )
}
_TENSOR = "tensor"


def code_of(mask: Mask, tensors: list[torch.Tensor]) -> str:
    """Return the words of a mask in prefix order, and append its tensors.

    A compiler traces this. Raises UnsupportedError if the mask is none of :mod:`mlagen.mla`.
    """
    name = type(mask).__name__
    if _KINDS.get(name) is not type(mask):
        rule = "one of mlagen.mla in compiled code"
        raise UnsupportedError(f"mask: expected {rule}, got {name}")
    words = [name]
    for part in mask.parts:
        value = getattr(mask, part)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            words.append(_TENSOR)
        else:
            words.append(code_of(value, tensors) if isinstance(value, Mask) else str(value))
    return " ".join(words)


def mask_of(code: str, tensors: list[torch.Tensor]) -> Mask:
    """Return the mask of a code from :func:`code_of`."""
    return _next_mask(code.split(), list(tensors))


def _next_mask(words: list[str], tensors: list[torch.Tensor]) -> Mask:
    kind, values = _KINDS[words.pop(0)], list[Any]()
    for _ in kind.parts:
        if words[0] in _KINDS:
            values.append(_next_mask(words, tensors))
            continue
        word = words.pop(0)
        number = None if word == "None" else word
        values.append(tensors.pop(0) if word == _TENSOR else number and int(number))
    mask: Mask = kind(*values)
    return mask
