"""Bad lengths, tables and lists of MLA decode, message by message."""

from __future__ import annotations

import pytest
import torch

import mlagen
from mlagen.errors import UnsupportedError
from tests.api.rejections import (
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
        "tables of keys and values apart, not announced",
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
    """Both are 32-bit, of the query's batch and device, without gaps."""
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
def test_tables_of_keys_and_values_apart(rejection: Rejection) -> None:
    """Without shared indices every request has two tables."""
    check(rejection)


@rejections(
    Rejection(
        "another number of entries",
        lambda _: {"sparse_mla_top_k": 64},
        "block_tables.shape: expected [2, 2, 64] (batch, q_len, sparse_mla_top_k), got [2, 2, 70]",
        SPARSE,
    ),
    Rejection(
        "one list for a request",
        lambda p: {"block_tables": p.block_tables[:, 0]},
        "block_tables.shape: expected [2, 2, 70] (batch, q_len, sparse_mla_top_k), got [2, 70]",
        SPARSE,
    ),
    Rejection(
        "lists of ragged queries by request",
        lambda p: {"block_tables": p.block_tables[None]},
        "block_tables.shape: expected [5, 70] (query tokens, sparse_mla_top_k), got [1, 5, 70]",
        SPARSE_RAGGED,
    ),
    Rejection(
        "gaps in a list",
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
        "lengths without lists",
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
def test_lists_of_tokens(rejection: Rejection) -> None:
    """Every query token has a list of exactly the announced length."""
    check(rejection)


@rejections(
    Rejection(
        "no tensor",
        lambda _: {"table_starts": [0, 2, 3]},
        "kv_indptr: expected a torch.Tensor, got list",
        FLAT,
    ),
    Rejection(
        "pages of each request instead of places",
        lambda p: {"table_starts": p.rare["table_starts"][1:]},
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
    """Page ids in a row come with the place where each request's begin."""
    check_inputs(rejection)


def test_values_in_other_pages_do_not_go_with_lists_of_tokens() -> None:
    """The pair is what no kernel covers, whatever the shape of the lists."""
    arguments = SPARSE.build("cpu").arguments(uses_shared_paged_kv_idx=False)

    with pytest.raises(UnsupportedError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    assert str(caught.value) == (
        "uses_shared_paged_kv_idx: not implemented with sparse_mla_top_k, expected True, got False"
    )
