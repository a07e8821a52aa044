"""Misaligned tensors of grouped-query decode."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.families.gqa_rejections import NVFP4, STACKED, UNIFORM, Rejection, check, rejections
from tests.families.rejections import displaced
from tests.problems.entry_points import decode_gqa as decode
from tests.problems.gqa import GqaProblem

NVFP4_OF_24_BYTES = replace(NVFP4, head_dim=48)


def moved_by_8(cache: torch.Tensor) -> torch.Tensor:
    """Return a copy whose base address is 8 bytes after a 16-byte boundary."""
    memory = torch.zeros(cache.numel() + 8, dtype=torch.uint8)
    return memory[8:].view(cache.shape).copy_(cache)


def stacked_with_a_gap(problem: GqaProblem) -> torch.Tensor:
    """Return a stacked cache whose values are 8 bytes after a 16-byte boundary."""
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
        "NVFP4 rows of 24 bytes, whose stride may be a multiple of 8",
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
def test_a_misaligned_tensor_is_rejected(rejection: Rejection) -> None:
    """A tensor without 16-byte alignment is rejected, on the CPU too."""
    check(rejection)


def test_nvfp4_rows_of_24_bytes_need_8_byte_alignment() -> None:
    """NVFP4 rows of 24 bytes may have 8-byte alignment."""
    problem = NVFP4_OF_24_BYTES.build("cpu")

    out = decode(problem, kv_cache=(moved_by_8(problem.store.key), problem.store.value))

    problem.check(out)
