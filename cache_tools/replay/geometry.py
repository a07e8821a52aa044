"""Lengths, offsets and page ids that are valid for the shapes of a call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

_CACHES = (
    *("kv_cache", "kv_cache[0]", "k_cache", "ckv_cache", "k.blocks"),
    *("paged_kv_cache", "paged_kv_cache[0]"),
)
_TABLES = ("block_tables", "page_table", "k.block_table")
_LENGTHS = (
    *("seq_lens", "kv_len", "k.cache_lengths", "mask.valid_lengths", "mask.a.valid_lengths"),
    *("mask.b.valid_lengths", "causal_seqlens_kv_global"),
)
_OFFSETS = ("cum_seq_lens_q", "q_cu_seq_lens", "qo_indptr", "kv_indptr", "indptr")
_PAGE_IDS = ("kv_indices", "indices")


class Geometry:
    """What the contents of a call's index tensors depend on.

    ``arguments`` and ``tensors`` are those of all parts. A size that no shape has counts as 1: such
    a call raises before it reads any content.
    """

    def __init__(self, arguments: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._arguments = arguments
        self.top_k = self._number("sparse_mla_top_k", 0)
        self.num_pages, self.page_size = 1, 1
        with suppress(IndexError, StopIteration):
            self._read_cache()
        self.batch = max(1, self._batch())
        self.tokens = self._tokens()
        self.q_len = -(-self.tokens // self.batch)

    def indices_of(self, name: str, count: int, generator: torch.Generator) -> torch.Tensor | None:
        """Return ``count`` lengths, offsets or ids of a tensor, int64; None of another."""
        is_top_k = name == "seq_lens" and self._arguments.get("backend") == "sparse"
        found = None
        if name in _TABLES or name in _PAGE_IDS:
            found = self._page_ids(name, count, generator)
        elif name in _OFFSETS or (name == "valid_length" and self._arguments.get("ragged")):
            has_pages = name in {"kv_indptr", "indptr"}
            total = self._num_page_ids() if has_pages else self.tokens
            found = torch.arange(count) * total // self.batch
        elif name == "last_page_len":
            found = self._random(count, 1, self.page_size, generator)
        elif name == "kv_len_arr":
            found = self._planned_lengths(count, generator)
        elif name == "valid_length":
            found = self._random(count, 1, self.q_len, generator)
        elif name == "sparse_mla_top_k_lens" or is_top_k:
            found = self._random(count, 1, self.top_k, generator)
        elif name in _LENGTHS:
            found = self._lengths(name, count, generator)
        return found

    def _read_cache(self) -> None:
        name = next(name for name in _CACHES if name in self._tensors)
        shape = list(self._tensors[name].shape)
        self.num_pages = max(1, shape[0])
        after_heads = self._arguments.get("kv_layout") == "HND"
        if len(shape) == 5:  # keys and values in one tensor
            page_size = shape[3 if after_heads else 2]
        elif name in {"kv_cache", "k.blocks"}:  # of MLA, with an axis of 1 or without
            page_size = max(shape[1:-1], default=1)
        else:
            page_size = shape[2 if after_heads else 1]
        self.page_size = max(1, self._number("page_size", page_size))

    def _batch(self) -> int:
        lengths = ("seq_lens", "kv_len", "kv_len_arr", "last_page_len")
        for name in (*lengths, "k.block_table", *_TABLES):
            tensor = self._tensors.get(name)
            if tensor is not None and tensor.dim():
                return tensor.shape[0]
        return 1

    def _tokens(self) -> int:
        """Return the query tokens of all requests."""
        for name in ("query", "query[0]", "q", "q_nope"):
            tensor = self._tensors.get(name)
            if tensor is None or tensor.dim() < 3:
                continue
            shape = tensor.shape
            if name == "q" and "num_kv_heads" in self._arguments:  # xqa: [batch, 1, (q_len,) ...]
                return shape[0] * (shape[2] if len(shape) == 5 else 1)
            return shape[0] * (shape[1] if len(shape) == 4 else 1)
        return 1

    def _num_page_ids(self) -> int:
        tables = [self._tensors[name] for name in _PAGE_IDS if name in self._tensors]
        return tables[0].numel() if tables else 0

    def _page_ids(self, name: str, count: int, generator: torch.Generator) -> torch.Tensor:
        if self.top_k and name == "block_tables":
            return self._random(count, 0, self.num_pages * self.page_size - 1, generator)
        order = torch.randperm(self.num_pages, generator=generator)
        return order[torch.arange(count) % self.num_pages]

    def _lengths(self, name: str, count: int, generator: torch.Generator) -> torch.Tensor:
        capacity = self.num_pages * self.page_size
        table = next((self._tensors[key] for key in _TABLES if key in self._tensors), None)
        if table is not None and table.dim() and not self.top_k:
            capacity = table.shape[-1] * self.page_size
        max_seq_len = self._number("max_seq_len", 0)
        capacity = min(capacity, max_seq_len) if max_seq_len > 0 else capacity
        low = min(self.q_len, capacity)
        lengths = self._random(count, low, capacity, generator)
        lengths[:1] = capacity
        return lengths - low if name == "k.cache_lengths" else lengths

    def _planned_lengths(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return lengths that end in the last page of each request of a plan."""
        offsets = self._tensors.get("kv_indptr")
        if offsets is None or offsets.numel() <= count:
            return torch.zeros(count, dtype=torch.int64)
        ends = offsets.detach().cpu().view(torch.int32).long().flatten()
        pages = (ends[1:] - ends[:-1])[:count]
        lengths = pages * self.page_size - self._random(count, 0, self.page_size - 1, generator)
        return torch.minimum(lengths.clamp(min=self.q_len), pages * self.page_size)

    def _number(self, name: str, default: int) -> int:
        value = self._arguments.get(name)
        return value if isinstance(value, int) else default

    @staticmethod
    def _random(count: int, low: int, high: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(low, max(low, high) + 1, (count,), generator=generator)
