"""Problem shapes; ``tokens`` are the query tokens of ragged sequences."""

from __future__ import annotations

from dataclasses import replace

from mlagen.families.common.problem import ProblemShape

SMS = 132


def mla_shape(
    batch: int, heads: int, max_kv_len: int, q_len: int = 1, tokens: int | None = None
) -> ProblemShape:
    """Return the shape of an MLA problem."""
    return ProblemShape(
        batch=batch,
        q_len=q_len if tokens is None else 0,
        tile_q_len=q_len,
        heads=heads,
        total_rows=(batch * q_len if tokens is None else tokens) * heads,
        max_kv_len=max_kv_len,
    )


def gqa_shape(
    batch: int,
    max_kv_len: int = 4096,
    kv_heads: int = 8,
    group: int = 8,
    q_len: int = 1,
    tokens: int | None = None,
) -> ProblemShape:
    """Return the shape of a GQA problem, of ``group`` query heads to a KV head."""
    return replace(mla_shape(batch, kv_heads * group, max_kv_len, q_len, tokens), kv_heads=kv_heads)
