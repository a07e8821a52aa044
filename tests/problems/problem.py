"""What every decode problem has: its facts, tensors amid poison, and the float64 result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from tests.problems.reference import Attention, assert_close, lse_tolerance, output_tolerance

E4M3 = torch.float8_e4m3fn
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", E4M3: "e4m3"}

# NaN in every storage format, scales included.
POISON = 0xFF

# Page ids past the last page of a sequence, and top-k indices to be skipped.
INVALID_IDS = (-1, 2**31 - 1, -(2**31), 1_000_000_000)


def bf16(*shape: int) -> torch.Tensor:
    """Return bf16 zeros."""
    return torch.zeros(shape, dtype=torch.bfloat16)


def ints(*numbers: int) -> torch.Tensor:
    """Return int32 numbers."""
    return torch.tensor(numbers, dtype=torch.int32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Facts of a problem; ``q_lens`` makes it ragged, else every sequence has ``q_len`` tokens."""

    name: str = ""  # the facts that are not usual, by default
    seq_lens: tuple[int, ...]
    q_len: int = 1
    q_lens: tuple[int, ...] | None = None
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16  # of the query
    output_scale: float = 1.0
    query_magnitude: float = 1.0
    spare_pages: int = 3  # columns of the block table past the longest sequence
    seed: int = 0

    def __str__(self) -> str:
        return self.name or ", ".join(self._unusual())

    def _unusual(self) -> Iterator[str]:
        for fact in fields(self):
            value = getattr(self, fact.name)
            if value != fact.default:
                yield f"{fact.name} {_shown(value)}"

    @property
    def lens(self) -> tuple[int, ...]:
        """Query tokens of each sequence."""
        return self.q_lens or (self.q_len,) * len(self.seq_lens)

    @property
    def page_counts(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-length // self.page_size) for length in self.seq_lens]


def _shown(value: object) -> str:
    if isinstance(value, tuple) and len(value) > 8:
        return f"{len(value)} up to {max(value)}"
    return _SHORT.get(value, str(value)) if isinstance(value, torch.dtype) else str(value)


@dataclass(frozen=True, kw_only=True)
class Problem(ABC):
    """The tensors of a case; a subclass knows the tokens that each query token attends to."""

    case: Case
    query: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    cum_seq_lens_q: torch.Tensor | None

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.query.device

    @property
    @abstractmethod
    def math_dtype(self) -> torch.dtype:
        """Dtype of the weights in the second MMA."""

    @property
    @abstractmethod
    def out_dtype(self) -> torch.dtype:
        """Dtype of an allocated output."""

    @property
    @abstractmethod
    def out_shape(self) -> tuple[int, ...]:
        """Shape of an output like the query."""

    @abstractmethod
    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Return keyword arguments of the family's first entry point."""

    @abstractmethod
    def expected(self) -> Attention:
        """Return the float64 result: out ``[tokens, heads, dim]`` and LSE ``[tokens, heads]``."""

    @abstractmethod
    def poison(self, seq: int, position: int) -> None:
        """Make key and value of a cached token NaN."""

    @abstractmethod
    def sees(self, seq: int, index: int, position: int) -> bool:
        """Return whether query token ``index`` of a sequence attends to a position."""

    def new_out(self, fill: float = math.nan) -> torch.Tensor:
        """Return an output for a call to write."""
        full = torch.full(self.out_shape, fill, device=self.device)
        return full.to(self.out_dtype)

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        """Return the page of a token and its place in the page."""
        page_size = self.case.page_size
        return int(self.block_tables[seq, position // page_size]), position % page_size

    def check(
        self,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        *,
        natural: bool = False,
        expected: Attention | None = None,
        what: str = "",
    ) -> None:
        """Fail unless every element of ``out``, and of ``lse`` if given, is right."""
        expected = expected or self.expected()
        assert out.dtype is self.out_dtype
        tolerance = output_tolerance(out.dtype, expected, self.math_dtype)
        assert_close(out.float().reshape(expected.out.shape), expected.out, tolerance, f"{what}out")
        if lse is not None:
            wanted = (expected.lse * (math.log(2) if natural else 1.0)).float()  # may be infinity
            tolerance = lse_tolerance(self.math_dtype, expected)
            assert_close(lse.reshape(wanted.shape), wanted, tolerance, f"{what}lse")
