"""Two entry points plan one problem alike, and so give equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper, trtllm_batch_decode_with_kv_cache
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.plan import shape_of
from mlagen.planned import metadata
from tests.fixture_types import Patch

# The shapes of FlashInfer's tests that compare the bits of both: batch, query tokens, page size, KV
# heads, group, then head dimension, the longest cached sequence, and the tokens before the window.
_512 = ((4, 1, 16, 2, 1), (4, 1, 32, 2, 5), (4, 3, 64, 4, 1), (128, 3, 16, 4, 8), (1, 6, 64, 2, 8))
_LONG = ((1, 1, 16, 2, 1), (1, 1, 32, 2, 5), (1, 3, 64, 2, 1), (1, 4, 64, 4, 1), (32, 16, 16, 2, 8))
SHAPES = [
    *((*sizes, 512, longest, -1) for sizes in _512 for longest in (110, 4096, 8192)),
    *((*sizes, 128, 4096 << step, -1) for sizes in _LONG for step in range(6)),
    *(
        (4, q_len, page_size, 2, group, 128, 1024, window)
        for page_size in (128, 256, 512, 1024)
        for q_len in (1, 2)
        for group in (1, 5)
        for window in (-1, 127)
    ),
    (1, 1, 16, 2, 1, 128, 1000, 1001),  # a window that the longest sequence does not reach
]


@pytest.mark.parametrize("place", ["on the host", "on the device"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_both_entry_points_have_one_plan(
    shape: tuple[int, ...], place: str, monkeypatch: Patch
) -> None:
    """Variant and shape, from which a plan follows, are equal, wherever the metadata is."""
    batch, q_len, page_size, kv_heads, group, head_dim, longest, window = shape
    seen: list[Any] = []

    def run(args: Any, *_: object) -> tuple[torch.Tensor, ...]:
        seen.append(args)
        return (args.query,)

    monkeypatch.setattr(GQA, "run", run)
    if place == "on the device":
        monkeypatch.setattr(metadata, "lengths_on_host", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, longest + 1, (batch,), generator=generator, dtype=torch.int32)
    lengths[-1] = longest
    lengths += q_len
    counts = -(-lengths // page_size)
    query = torch.zeros(batch * q_len, kv_heads * group, head_dim, dtype=torch.bfloat16)
    caches = (torch.zeros(1, kv_heads, page_size, head_dim, dtype=torch.bfloat16),) * 2
    workspace = torch.empty(0)

    trtllm_batch_decode_with_kv_cache(
        query,
        caches,
        workspace,
        torch.zeros(batch, int(counts.max()), dtype=torch.int32),
        lengths,
        int(lengths.max()),
        window_left=window,
        q_len_per_req=q_len,
    )
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", backend="trtllm-gen")
    wrapper.plan(
        torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0)),
        torch.zeros(int(counts.sum()), dtype=torch.int32),
        (lengths - 1) % page_size + 1,
        kv_heads * group,
        kv_heads,
        head_dim,
        page_size,
        q_data_type="bfloat16",
        window_left=window,
    )
    wrapper.run(query, caches, q_len_per_req=q_len)

    one, other = ((GQA.family.validate(args)[1], args) for args in seen)
    assert one[0].variant == other[0].variant
    assert shape_of(one[1], one[0]) == shape_of(other[1], other[0])
    assert seen[1].max_seq_len == int(lengths.max())
