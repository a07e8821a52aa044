"""Invalid lengths, block tables and top-k indices of MLA decode, message by message."""

from __future__ import annotations

import pytest
import torch

import mlagen
from mlagen.errors import UnsupportedError
from tests.families.rejections import (
    FLAT,
    OTHER_PAGES,
    SPARSE,
    SPARSE_RAGGED,
    Rejection,
    check,
    check_inputs,
    padded,
    rejections,
    strided,
)


@rejections(
    Rejection(
        "a list",
        lambda _: {"seq_lens": [70, 3]},
        "seq_lens: expected a torch.Tensor, got list",
    ),
    Rejection(
        "another device",
        lambda p: {"seq_lens": p.seq_lens.to("meta")},
        "seq_lens.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "int64",
        lambda p: {"seq_lens": p.seq_lens.long()},
        "seq_lens.dtype: expected torch.int32 or torch.uint32, got torch.int64",
    ),
    Rejection(
        "two dimensions",
        lambda p: {"seq_lens": p.seq_lens[:, None]},
        "seq_lens.ndim: expected 1, got 2",
    ),
    Rejection(
        "gaps",
        lambda p: {"seq_lens": strided(p.seq_lens)},
        "seq_lens must be contiguous: expected no gaps in shape [2], got strides (2,)",
    ),
    Rejection(
        "another batch",
        lambda p: {"seq_lens": p.seq_lens.repeat(2)},
        "seq_lens.shape: expected [2] (batch of query), got [4]",
    ),
    Rejection(
        "no tables",
        lambda _: {"block_tables": None},
        "block_tables: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "tables on another device",
        lambda p: {"block_tables": p.block_tables.to("meta")},
        "block_tables.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "int64 tables",
        lambda p: {"block_tables": p.block_tables.long()},
        "block_tables.dtype: expected torch.int32 or torch.uint32, got torch.int64",
    ),
    Rejection(
        "separate tables of keys and values with shared page ids",
        lambda p: {"block_tables": p.block_tables[:, None].expand(-1, 2, -1)},
        "block_tables.ndim: expected 2, got 3",
    ),
    Rejection(
        "gaps in a table",
        lambda p: {"block_tables": strided(p.block_tables)},
        "block_tables.stride(-1): expected 1, got 2",
    ),
    Rejection(
        "tables of another batch",
        lambda p: {"block_tables": p.block_tables[:1]},
        "block_tables.shape[0]: expected 2 (batch), got 1",
    ),
)
def test_lengths_and_tables(rejection: Rejection) -> None:
    """Both are 32-bit, contiguous, with the query's batch and device."""
    check(rejection)


@rejections(
    Rejection(
        "one table",
        lambda p: {"block_tables": p.block_tables[:, 0]},
        "block_tables.ndim: expected 3, got 2",
        OTHER_PAGES,
    ),
    Rejection(
        "a list",
        lambda _: {"block_tables": []},
        "block_tables: expected a torch.Tensor, got list",
        OTHER_PAGES,
    ),
    Rejection(
        "three tables",
        lambda p: {"block_tables": p.block_tables[:, :1].expand(-1, 3, -1)},
        "block_tables.shape[1]: expected 2 (keys, values), got 3",
        OTHER_PAGES,
    ),
)
def test_separate_tables_of_keys_and_values(rejection: Rejection) -> None:
    """Without shared page ids every request has two block tables."""
    check(rejection)


@rejections(
    Rejection(
        "another number of entries",
        lambda _: {"sparse_mla_top_k": 64},
        "block_tables.shape: expected [2, 2, 64] (batch, q_len, sparse_mla_top_k), got [2, 2, 70]",
        SPARSE,
    ),
    Rejection(
        "one row of indices for a request",
        lambda p: {"block_tables": p.block_tables[:, 0]},
        "block_tables.shape: expected [2, 2, 70] (batch, q_len, sparse_mla_top_k), got [2, 70]",
        SPARSE,
    ),
    Rejection(
        "indices of ragged queries by request",
        lambda p: {"block_tables": p.block_tables[None]},
        "block_tables.shape: expected [5, 70] (query tokens, sparse_mla_top_k), got [1, 5, 70]",
        SPARSE_RAGGED,
    ),
    Rejection(
        "gaps in a row of indices",
        lambda p: {"block_tables": strided(p.block_tables)},
        "block_tables.stride(-1): expected 1, got 2",
        SPARSE,
    ),
    Rejection(
        "a gap between requests",
        lambda p: {"block_tables": padded(p.block_tables, 1, dim=1)},
        "block_tables.stride(0): expected 140 (q_len * stride of a query token), got 210",
        SPARSE,
    ),
    Rejection(
        "a negative number",
        lambda _: {"sparse_mla_top_k": -1},
        "sparse_mla_top_k: expected an int, 0 or more, got -1",
        SPARSE,
    ),
    Rejection(
        "a fraction",
        lambda _: {"sparse_mla_top_k": 70.0},
        "sparse_mla_top_k: expected an int, 0 or more, got 70.0",
        SPARSE,
    ),
    Rejection(
        "lengths without indices",
        lambda _: {"sparse_mla_top_k_lens": torch.ones(4, dtype=torch.int32)},
        "sparse_mla_top_k_lens: expected None without sparse_mla_top_k, got a tensor",
    ),
    Rejection(
        "lengths of requests",
        lambda _: {"sparse_mla_top_k_lens": torch.ones(2, dtype=torch.int32)},
        "sparse_mla_top_k_lens.shape: expected [4] (query tokens), got [2]",
        SPARSE,
    ),
    Rejection(
        "int64 lengths",
        lambda _: {"sparse_mla_top_k_lens": torch.ones(4, dtype=torch.int64)},
        "sparse_mla_top_k_lens.dtype: expected torch.int32 or torch.uint32, got torch.int64",
        SPARSE,
    ),
    Rejection(
        "lengths with gaps",
        lambda _: {"sparse_mla_top_k_lens": strided(torch.ones(4, dtype=torch.int32))},
        "sparse_mla_top_k_lens must be contiguous: expected no gaps in shape [4], got strides (2,)",
        SPARSE,
    ),
)
def test_topk_indices(rejection: Rejection) -> None:
    """Every query token has exactly ``sparse_mla_top_k`` indices."""
    check(rejection)


@rejections(
    Rejection(
        "no tensor",
        lambda _: {"kv_indptr": [0, 2, 3]},
        "kv_indptr: expected a torch.Tensor, got list",
        FLAT,
    ),
    Rejection(
        "pages of each request instead of offsets",
        lambda p: {"kv_indptr": p.extra_args["kv_indptr"][1:]},
        "kv_indptr.shape: expected [3] (batch + 1), got [2]",
        FLAT,
    ),
    Rejection(
        "page ids in two dimensions",
        lambda p: {"block_tables": p.block_tables[None]},
        "block_tables.ndim: expected 1, got 2",
        FLAT,
    ),
    Rejection(
        "page ids with gaps",
        lambda p: {"block_tables": strided(p.block_tables)},
        "block_tables must be contiguous: expected no gaps in shape [11], got strides (2,)",
        FLAT,
    ),
)
def test_flat_tables(rejection: Rejection) -> None:
    """Flat page ids have the offset of each request."""
    check_inputs(rejection)


def test_separate_value_pages_are_rejected_in_sparse_calls() -> None:
    """No kernel supports separate value pages with top-k indices of any shape."""
    arguments = SPARSE.build("cpu").arguments(uses_shared_paged_kv_idx=False)

    with pytest.raises(UnsupportedError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    assert str(caught.value) == (
        "uses_shared_paged_kv_idx: not implemented with sparse_mla_top_k, expected True, got False"
    )
