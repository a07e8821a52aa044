"""Problems of block-sparse and token-sparse grouped-query decode, for every backend."""

from __future__ import annotations

from typing import Any

import torch

from tests.problems.sparse_gqa import SparseCase

FP16 = torch.float16


def msa(name: str, **facts: Any) -> SparseCase:
    """Return a case of ``msa_sparse_decode_attention``."""
    return SparseCase(name=f"msa, {name}", **facts)


def qsa(name: str, **facts: Any) -> SparseCase:
    """Return a case of ``qsa_sparse_paged_attention``."""
    usual: dict[str, Any] = {"page_size": 16, "head_dim": 64, "num_indices": 40, "group": 3}
    return SparseCase(name=f"qsa, {name}", kind="qsa", **usual | facts)


# At a block's first token and at its last one, a single block, and none: padded rows of a graph.
_BORDERS = (0, 1, 127, 128, 129, 256, 257, 640)
MSA_CASES = [
    msa("borders of blocks", seq_lens=_BORDERS, kv_heads=1),
    msa("drafts", seq_lens=(640, 129, 3, 0, 2, 128), q_len=4, group=2),
    msa("16 query heads", seq_lens=(700, 60), group=16, num_indices=16, kv_heads=1),
    msa("40 query heads", seq_lens=(300,), group=40, kv_heads=1, head_dim=64),
    msa("packed", seq_lens=(500, 130), is_packed=True, q_len=2),
    msa("e4m3", seq_lens=(500, 130, 5), kv="e4m3", q_len=2, output_scale=0.5),
    msa("packed e4m3", seq_lens=(500, 129), kv="e4m3", is_packed=True, dtype=FP16),
    msa("e5m2", seq_lens=(300, 2), kv="e5m2", head_dim=64),
    msa("int8", seq_lens=(300, 2), kv="int8", head_dim=64, output_scale=0.02),
    msa("valid, ascending", seq_lens=(900, 130), indices="valid", q_len=3),
    msa("nothing but -1", seq_lens=(900, 130), indices="-1"),
    msa("wild indices", seq_lens=(900, 130), indices="invalid"),
    msa("one block many times", seq_lens=(900, 100), indices="twice", num_indices=3),
    msa("own block missing", seq_lens=(900, 130, 100), indices="own missing"),
    msa("own block alone", seq_lens=(900, 130, 100), indices="last", q_len=2),
    msa("one index", seq_lens=(900, 130), num_indices=1),
    msa("64 indices", seq_lens=(1200,), num_indices=64, kv_heads=1, head_dim=64),
    msa("page ids outside of the cache", seq_lens=(900, 130), has_pages=False),
]
_REQUESTS = (0, 1, 1, 2, 0)
QSA_CASES = [
    qsa("counts", seq_lens=(300, 70, 9), requests=_REQUESTS, counts=(40, 0, 1, 39, 41)),
    qsa("wild counts", seq_lens=(300, 70), requests=(0, 1, 0), counts=(-1, 2**31 - 1, -(2**31))),
    qsa("gated", seq_lens=(300, 70, 9), requests=_REQUESTS, gate=True),
    qsa("requests outside", seq_lens=(300, 70), requests=(1, -1, 2, 0, 2**31 - 1), gate=True),
    qsa("24 heads of 256", seq_lens=(300,), requests=(0, 0), head_dim=256, group=12, gate=True),
    qsa("e4m3", seq_lens=(300, 70), requests=(1, 0, 0), kv="e4m3", output_scale=0.5),
    qsa("nvfp4", seq_lens=(300, 70), requests=(1, 0, 0), kv="nvfp4", gate=True),
    qsa("fp16", seq_lens=(300, 70), requests=(1, 0, 0), dtype=FP16, head_dim=512, gate=True),
    qsa("pages of 5", seq_lens=(300, 70), requests=(1, 0, 0), page_size=5, head_dim=80),
    qsa("one index", seq_lens=(300, 70), requests=(1, 0, 0), num_indices=1),
    qsa("valid, -1 behind", seq_lens=(300, 17), requests=(1, 0, 0), indices="valid"),
    qsa("nothing but -1", seq_lens=(300, 17), requests=(1, 0), indices="-1"),
    qsa("wild indices", seq_lens=(300, 17), requests=(1, 0), indices="invalid"),
    qsa("one token many times", seq_lens=(300, 17), requests=(1, 0), indices="twice"),
    qsa("page ids outside of the cache", seq_lens=(300, 70), requests=(1, 0), has_pages=False),
    qsa(
        "a long list",
        seq_lens=(3000,),
        requests=(0,),
        num_indices=2051,
        kv_heads=1,
        kv="nvfp4",
        gate=True,
    ),
    qsa(
        "tails",
        seq_lens=(700, 3),
        requests=(0, 0, 1, 0),
        num_indices=274,
        counts=(259, 256, 3, 274),
    ),
]
CASES = [*MSA_CASES, *QSA_CASES]
