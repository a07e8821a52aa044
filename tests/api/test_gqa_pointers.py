"""Tensors of grouped-query decode that do not begin where a kernel can read or write."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.api.gqa_rejections import NVFP4, STACKED, UNIFORM, Rejection, check, rejections
from tests.api.rejections import displaced
from tests.gqa_problems import GqaProblem
from tests.gqa_semantics import decode

NVFP4_OF_24_BYTES = replace(NVFP4, head_dim=48)


def moved_by_8(cache: torch.Tensor) -> torch.Tensor:
    """Return bytes in memory that begins 8 after a 16-byte address."""
    memory = torch.zeros(cache.numel() + 8, dtype=torch.uint8)
    return memory[8:].view(cache.shape).copy_(cache)


def stacked_with_a_gap(problem: GqaProblem) -> torch.Tensor:
    """Return both caches in one tensor, the values 8 bytes after a 16-byte address."""
    key, value = problem.store.key, problem.store.value
    pages, elements = len(key), key[0].numel()
    memory = torch.zeros(pages, 2 * elements + 8, dtype=key.dtype)
    both = memory.as_strided(
        (pages, 2, *key.shape[1:]), (2 * elements + 8, elements + 4, *key.stride()[1:])
    )
    both[:, 0], both[:, 1] = key, value
    return both


@rejections(
    Rejection(
        "query",
        lambda p: {"query": displaced(p.query)},
        "query.data_ptr(): expected a multiple of 16, got 2 more than one",
    ),
    Rejection(
        "keys",
        lambda p: {"kv_cache": (displaced(p.store.key), p.store.value)},
        "kv_cache[0].data_ptr(): expected a multiple of 16, got 2 more than one",
    ),
    Rejection(
        "values",
        lambda p: {"kv_cache": (p.store.key, displaced(p.store.value))},
        "kv_cache[1].data_ptr(): expected a multiple of 16, got 2 more than one",
    ),
    Rejection(
        "values in the tensor of the keys",
        lambda p: {"kv_cache": stacked_with_a_gap(p)},
        "kv_cache.data_ptr(): expected a multiple of 16, got 8 more than one",
        STACKED,
    ),
    Rejection(
        "NVFP4 rows of 24 bytes, which may be 8 bytes apart",
        lambda p: {"kv_cache": (displaced(p.store.key), p.store.value)},
        "kv_cache[0].data_ptr(): expected a multiple of 8, got 1 more than one",
        NVFP4_OF_24_BYTES,
    ),
    Rejection(
        "NVFP4 rows of 32 bytes",
        lambda p: {"kv_cache": (moved_by_8(p.store.key), p.store.value)},
        "kv_cache[0].data_ptr(): expected a multiple of 16, got 8 more than one",
        replace(NVFP4, head_dim=64),
    ),
    Rejection(
        "workspace",
        lambda _: {"workspace_buffer": displaced(torch.zeros(64))},
        "workspace_buffer.data_ptr(): expected a multiple of 16, got 4 more than one",
    ),
    Rejection(
        "out",
        lambda p: {"out": displaced(torch.zeros_like(p.query))},
        "out.data_ptr(): expected a multiple of 16, got 2 more than one",
    ),
    Rejection(
        "mask",
        lambda p: {"mask": displaced(p.mask.view(torch.int16)).view(torch.uint16)},
        "mask.data_ptr(): expected a multiple of 4, got 2 more than one",
        UNIFORM,
    ),
)
def test_a_tensor_that_begins_between_addresses(rejection: Rejection) -> None:
    """Rows are copied 16 bytes at a time, on the CPU as on the GPU."""
    check(rejection)


def test_nvfp4_rows_of_no_whole_16_bytes_may_begin_at_any_8() -> None:
    """Rows of 24 bytes are copied 8 at a time."""
    problem = NVFP4_OF_24_BYTES.build("cpu")

    out = decode(problem, kv_cache=(moved_by_8(problem.store.key), problem.store.value))

    problem.check(out)
