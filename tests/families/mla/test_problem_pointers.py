"""Misaligned tensors of MLA decode."""

from __future__ import annotations

import torch

from tests.families.rejections import Rejection, check, displaced, rejections


@rejections(
    Rejection(
        "query",
        lambda p: {"query": displaced(p.query)},
        "query.data_ptr(): expected a multiple of 16, got 2 more than one",
    ),
    Rejection(
        "cache",
        lambda p: {"kv_cache": displaced(p.kv_cache)},
        "kv_cache.data_ptr(): expected a multiple of 16, got 2 more than one",
    ),
    Rejection(
        "out",
        lambda p: {"out": displaced(torch.zeros(*p.query.shape[:-1], 512).bfloat16())},
        "out.data_ptr(): expected a multiple of 16, got 2 more than one",
    ),
)
def test_a_misaligned_tensor_is_rejected(rejection: Rejection) -> None:
    """A tensor without 16-byte alignment is rejected, on the CPU too."""
    check(rejection)
