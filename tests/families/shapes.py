"""Problem shapes; ``tokens`` are the query tokens of ragged sequences."""

from __future__ import annotations

from mlagen.families.common.plan_sm80 import GqaProblemShape, MlaProblemShape

SMS = 132


def mla_shape(
    batch: int, heads: int, max_kv_len: int, q_len: int = 1, tokens: int | None = None
) -> MlaProblemShape:
    """Return the shape of an MLA problem."""
    return MlaProblemShape(
        batch=batch,
        q_len=q_len if tokens is None else 0,
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
) -> GqaProblemShape:
    """Return the shape of a GQA problem, of ``group`` query heads to a KV head."""
    shape = mla_shape(batch, kv_heads * group, max_kv_len, q_len, tokens)
    return GqaProblemShape(**vars(shape), max_q_len=q_len, kv_heads=kv_heads)
