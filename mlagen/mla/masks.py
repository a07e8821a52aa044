"""Masks of :func:`mlagen.mla.flare.flare_mla_decoding`, and the bias that says what they hide.

A query token stands at position ``Q`` of its request, the first new token behind what was cached.
:class:`OrMask` and :class:`AndMask` combine what is hidden, as Modular names them: a token is
hidden if either mask hides it, or if both do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mlagen.api.arguments import (
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
    """What a mask may ask of the query tokens of a call."""

    requests: torch.Tensor  # int64 [tokens], which one each token belongs to
    positions: torch.Tensor  # int64 [tokens], where it stands among the tokens of its request
    batch: int
    heads: int
    width: int  # key positions to say something of


class Mask:
    """What a query token may see of its request."""

    def bias(self, rows: QueryRows) -> torch.Tensor:
        """Return what is added to the scores, fp32 ``[tokens, heads or 1, width]``.

        Raises
        ------
        ArgumentError
            If a tensor of the mask breaks a rule.
        """
        seen = self.sees(rows, torch.arange(rows.width, device=rows.positions.device))
        return torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, -math.inf)[:, None]

    def sees(
        self,
        rows: QueryRows,  # noqa: ARG002 - for masks that override it
        keys: torch.Tensor,  # noqa: ARG002 - likewise
    ) -> torch.Tensor:
        """Return which positions ``keys[width]`` a token sees, bool ``[tokens, width]``."""
        rule = "a mask that says what is seen"
        reject("mask", rule, f"{type(self).__name__}, which has neither sees nor bias")


@dataclass(frozen=True)
class NullMask(Mask):
    """Every token of the request is seen."""

    def sees(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return true for all positions."""
        return keys >= torch.zeros_like(rows.positions)[:, None]


@dataclass(frozen=True)
class CausalMask(Mask):
    """The tokens up to ``Q`` are seen."""

    def sees(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return true up to the query's own position."""
        return keys <= rows.positions[:, None]


@dataclass(frozen=True)
class SlidingWindowCausalMask(Mask):
    """The last ``window`` tokens up to ``Q`` are seen, that one included."""

    window: int

    def __post_init__(self) -> None:
        """Reject a window of nothing."""
        _set_size(self, "window")

    def sees(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return true from ``Q - window + 1`` to ``Q``."""
        own = rows.positions[:, None]
        return (keys <= own) & (keys > own - self.window)


@dataclass(frozen=True)
class SlidingWindowNonCausalMask(Mask):
    """The tokens after ``Q - window`` are seen, with those after ``Q``."""

    window: int

    def __post_init__(self) -> None:
        """Reject a window of nothing."""
        _set_size(self, "window")

    def sees(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return true from ``Q - window + 1`` on."""
        return keys > rows.positions[:, None] - self.window


@dataclass(frozen=True)
class ChunkedMask(Mask):
    """The tokens of the chunk of ``size`` that ``Q`` lies in are seen, with those after ``Q``."""

    size: int

    def __post_init__(self) -> None:
        """Reject chunks of nothing."""
        _set_size(self, "size")

    def sees(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return true in the chunk of the query."""
        return keys // self.size == (rows.positions // self.size)[:, None]


@dataclass(frozen=True)
class ChunkedCausalMask(ChunkedMask):
    """The tokens of the chunk of ``size`` that ``Q`` lies in are seen, up to ``Q``."""

    def sees(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return true in the chunk of the query, up to it."""
        return super().sees(rows, keys) & (keys <= rows.positions[:, None])


@dataclass(frozen=True, eq=False)
class CausalPaddingMask(Mask):
    """The tokens up to ``Q`` are seen, if they are among the first ``valid_lengths`` of a request.

    ``valid_lengths`` is int32 or uint32 ``[batch]``.
    """

    valid_lengths: torch.Tensor

    def sees(self, rows: QueryRows, keys: torch.Tensor) -> torch.Tensor:
        """Return true up to the query's own position, except for padding."""
        name = "mask.valid_lengths"
        lengths = require_tensor(self.valid_lengths, name)
        require_index(lengths, name, rows.positions.device)
        require_shape(lengths, name, ((rows.batch,),), "batch")
        valid = lengths.view(torch.int32)[rows.requests][:, None]
        return (keys <= rows.positions[:, None]) & (keys < valid)


@dataclass(frozen=True, eq=False)
class MaterializedMask(Mask):
    """Numbers are added to the scaled scores; what the tensor does not reach is hidden.

    ``tensor`` is of floats, ``[batch, queries, keys]`` or ``[batch, heads, queries, keys]``; the
    row of a token is ``Q - start_pos``. ``start_pos`` is a number, or int32 or uint32 ``[batch]``;
    None stands for ``keys - queries``. Minus infinity hides.
    """

    tensor: torch.Tensor
    start_pos: int | torch.Tensor | None = None

    def bias(self, rows: QueryRows) -> torch.Tensor:
        """Return the numbers of the tensor."""
        numbers = self._checked(rows)
        queries, keys = numbers.shape[2:]
        asked = rows.positions - self._start(rows, keys - queries)
        is_inside = (asked >= 0) & (asked < queries)
        found = numbers[rows.requests, :, asked.clamp(0, queries - 1), : rows.width].float()
        found = torch.where(is_inside[:, None, None], found, -math.inf)
        return torch.nn.functional.pad(found, (0, max(0, rows.width - keys)), value=-math.inf)

    def _checked(self, rows: QueryRows) -> torch.Tensor:
        """Return the tensor with an axis of heads."""
        name = "mask.tensor"
        numbers = require_tensor(self.tensor, name)
        require_device(numbers, name, rows.positions.device)
        require(numbers.is_floating_point(), f"{name}.dtype", "a dtype of floats", numbers.dtype)
        require_dims(numbers, name, (3, 4))
        queries, keys = numbers.shape[-2:]
        require(queries > 0 and keys > 0, f"{name}.shape", "1 or more of each", list(numbers.shape))
        allowed = ((rows.batch, queries, keys), (rows.batch, rows.heads, queries, keys))
        require_shape(numbers, name, allowed, "batch, heads or none, queries, keys")
        return numbers if numbers.dim() == 4 else numbers[:, None]

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
    """A token is hidden if either mask hides it; what they add adds up."""

    a: Mask
    b: Mask

    def bias(self, rows: QueryRows) -> torch.Tensor:
        """Return the sum of both."""
        a, b = _both(self, rows)
        is_hidden = (a == -math.inf) | (b == -math.inf)
        return torch.where(is_hidden, -math.inf, a + b)  # a hidden number may be NaN


@dataclass(frozen=True, eq=False)
class AndMask(Mask):
    """A token is hidden if both masks hide it; of what they add the larger counts."""

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


def _set_size(mask: Mask, name: str) -> None:
    """Have a field of a frozen mask be a plain int, 1 or more."""
    size = require_whole_number(getattr(mask, name), name, least=1)
    object.__setattr__(mask, name, size)


def form_of_bias(mask: Mask, q: torch.Tensor, batch: int) -> torch.Tensor:
    """Return a bias of no positions, after the checks of a mask.

    Raises
    ------
    ArgumentError
        If a tensor of the mask breaks a rule.
    """
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    heads = q.shape[-2]
    mask.bias(QueryRows(requests=none, positions=none, batch=batch, heads=heads, width=0))
    tokens = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    return torch.empty((tokens, 1, 0), dtype=torch.float32, device=q.device)
