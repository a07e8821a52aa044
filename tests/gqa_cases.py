"""GQA decode problems for every backend."""

from __future__ import annotations

from itertools import cycle, product
from typing import NamedTuple

import torch

from tests.gqa_problems import E4M3, GqaCase

_BF16, _FP16 = torch.bfloat16, torch.float16


class Dtypes(NamedTuple):
    """Dtypes of query, cache and output."""

    dtype: torch.dtype
    kv: str
    out_dtype: torch.dtype | None = None

    def __str__(self) -> str:
        query = "bf16" if self.dtype is _BF16 else "fp16"
        cache = "" if self.kv == "16-bit" else f" over {self.kv}"
        return f"{query}{cache}{' to e4m3' if self.out_dtype else ''}"


BF16 = Dtypes(_BF16, "16-bit")
E4M3_KV = Dtypes(_BF16, "e4m3")
DTYPES = (
    BF16,
    Dtypes(_FP16, "16-bit"),
    E4M3_KV,
    Dtypes(_FP16, "e4m3"),
    Dtypes(_BF16, "e4m3", E4M3),
    Dtypes(_FP16, "e4m3", E4M3),
    Dtypes(_BF16, "int8"),
    Dtypes(_FP16, "int8"),
    Dtypes(_BF16, "nvfp4"),
    Dtypes(_FP16, "nvfp4"),
)
KINDS = (BF16, E4M3_KV, Dtypes(_FP16, "int8"), Dtypes(_BF16, "nvfp4"))

# Batch, q_len, page size, KV heads, group, head dim, as FlashInfer tests them.
SHAPES = (
    (4, 4, 64, 4, 2, 128),
    (4, 2, 16, 2, 4, 128),
    (4, 3, 32, 2, 6, 128),
    (4, 1, 16, 2, 1, 128),
    (4, 1, 32, 2, 5, 128),
    (128, 1, 64, 2, 6, 128),
    (32, 1, 64, 4, 8, 128),
    (4, 1, 32, 2, 16, 128),
    (4, 4, 32, 2, 16, 128),
    (4, 1, 32, 2, 4, 512),
    (4, 1, 32, 2, 5, 512),
    (16, 1, 64, 2, 8, 512),
    (4, 1, 16, 2, 16, 512),
)
_dtypes = cycle(DTYPES[:6])
_masks = cycle(("causal", "full", None, "random"))
_layouts = cycle(("NHD", "HND"))
_sinks = cycle((None, 3.0, 3.0))
_cache_layouts = cycle(("tuple", "stacked", "list", "strided", "shared"))

FLASHINFER_CASES = tuple(
    GqaCase(
        name=f"{batch} sequences of {q_len}, page {page}, {heads} x {group} heads of {head_dim}, "
        f"window {window}, {dtypes}",
        seq_lens=tuple(110 - index % 7 for index in range(batch)),
        q_len=q_len,
        page_size=page,
        kv_heads=heads,
        group=group,
        head_dim=head_dim,
        dtype=dtypes.dtype,
        kv=dtypes.kv,
        out_dtype=dtypes.out_dtype,
        output_scale=1.0 if dtypes.kv == "16-bit" else 0.5,
        window=window,
        sink=next(_sinks),
        mask=next(_masks) if q_len > 1 else None,
        layout=next(_layouts),
        cache_layout=next(_cache_layouts),
    )
    for (batch, q_len, page, heads, group, head_dim), window in product(SHAPES, (0, 128))
    for dtypes in (next(_dtypes), next(_dtypes))
)

DRAFT_CASES = (
    *(
        GqaCase(
            name=f"drafts of {q_len}, page {page}, {heads} x {group} heads, window {window}, "
            f"{longest} tokens, {dtypes}",
            seq_lens=(longest, 300),
            q_len=q_len,
            page_size=page,
            kv_heads=heads,
            group=group,
            window=window,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            sink=next(_sinks),
            mask=next(_masks),
        )
        for (q_len, page, heads, group), window, (longest, dtypes) in product(
            ((2, 32, 2, 4), (4, 64, 4, 2), (5, 16, 2, 8), (4, 32, 2, 16)),
            (64, 128),
            ((300, BF16), (300, E4M3_KV), (30_000, BF16)),
        )
    ),
    *(
        GqaCase(
            name=f"ragged drafts {q_lens}, window {window}, {longest} tokens, {dtypes}",
            seq_lens=(longest, 300, 17, 4),
            q_lens=q_lens,
            window=window,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            sink=next(_sinks),
            mask=next(_masks),
            layout=next(_layouts),
        )
        for q_lens, window, (longest, dtypes) in product(
            ((1, 3, 2, 4), (5, 1, 3, 2), (1, 4, 2, 3), (5, 0, 3, 2)),
            (0, 128),
            ((300, BF16), (300, E4M3_KV), (6_000, BF16)),
        )
    ),
    *(
        GqaCase(
            name=f"drafts of {q_len}, {mask} mask, {dtypes}",
            seq_lens=(0, 1, q_len - 1, q_len, q_len + 1, 100 + q_len),
            q_len=q_len,
            mask=mask,
            head_dim=64,
            group=2,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
        )
        for (q_len, mask), dtypes in product(
            (
                *((q_len, "random") for q_len in (2, 5, 31, 32, 33, 64, 70)),
                *((5, mask) for mask in (None, "causal", "full", "blind")),
                (33, None),
                (33, "blind"),
            ),
            (BF16, E4M3_KV),
        )
    ),
    GqaCase(
        name="ragged drafts of up to 64, random mask",
        seq_lens=(300, 64, 40, 5, 0),
        q_lens=(64, 33, 1, 7, 2),
        mask="random",
        head_dim=64,
    ),
    GqaCase(
        name="drafts of 33, random mask, split",
        seq_lens=(5000, 60),
        q_len=33,
        mask="random",
        sink=3.0,
        head_dim=64,
    ),
)

EDGE_CASES = (
    *(
        GqaCase(
            name=f"page size {page}",
            page_size=page,
            seq_lens=(0, 1, 2, page - 1, page, page + 1, 63, 64, 65, 300),
        )
        for page in (1, 2, 5, 8, 16, 32, 64, 128)
    ),
    *(
        GqaCase(
            name=f"head dim {head_dim}, {dtypes}",
            head_dim=head_dim,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            seq_lens=(0, 1, 17, 70, 257),
            sink=3.0,
        )
        for head_dim, dtypes in product((16, 32, 48, 64, 80, 96, 128, 192, 256, 512), KINDS)
    ),
    *(
        GqaCase(
            name=f"{kv_heads} x {group} heads, {q_len} query tokens",
            kv_heads=kv_heads,
            group=group,
            q_len=q_len,
            head_dim=64,
            seq_lens=(0, 5, 130),
        )
        for (kv_heads, q_len), group in product(
            ((1, 1), (3, 1), (2, 3)), (1, 2, 4, 5, 6, 7, 8, 16, 33, 64)
        )
    ),
    *(
        GqaCase(
            name=f"window {window}, {q_len} query tokens, {dtypes}",
            window=window,
            q_len=q_len,
            seq_lens=(0, 1, q_len, 15, 16, 17, 200),
            sink=3.0,
            head_dim=64,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
        )
        for window, q_len, dtypes in product(
            (1, 2, 7, 16, 17, 64, 1000, 2**31 - 1), (1, 4), (BF16, E4M3_KV)
        )
    ),
    *(
        GqaCase(
            name=f"cache as {cache_layout}, {layout}, {dtypes}",
            seq_lens=(1, 16, 70, 0),
            q_len=2,
            head_dim=64,
            cache_layout=cache_layout,
            layout=layout,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
        )
        for cache_layout, layout, dtypes in product(
            ("tuple", "list", "stacked", "strided", "shared"), ("NHD", "HND"), KINDS
        )
    ),
)

NUMBER_CASES = (
    *(
        GqaCase(
            name=f"scales of {scale}, {dtypes}",
            seq_lens=(70, 3),
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            out_dtype=dtypes.out_dtype,
            output_scale=scale,
            o_scale=0.3,
        )
        for scale, dtypes in product((0.25, 3.0, -1.5), DTYPES)
    ),
    GqaCase(name="no scale", seq_lens=(200,), score_scale=0.0),
    GqaCase(name="negative scale", seq_lens=(200,), score_scale=-0.05),
    GqaCase(name="growing scores", seq_lens=(700,), query_magnitude=30.0),
    GqaCase(name="sinks of 30", seq_lens=(70, 3, 0), sink=30.0, q_len=2),
    GqaCase(name="sinks of 30, split", seq_lens=(5000, 3), sink=30.0),
    GqaCase(name="all sequences empty", seq_lens=(0, 0, 0), sink=3.0),
    *(
        GqaCase(
            name=f"long enough to split, {dtypes}",
            seq_lens=(4000, 1),
            head_dim=64,
            kv_heads=1,
            group=8,
            sink=3.0,
            dtype=dtypes.dtype,
            kv=dtypes.kv,
            out_dtype=dtypes.out_dtype,
            output_scale=0.5,
        )
        for dtypes in DTYPES
    ),
    GqaCase(name="split and of all lengths", seq_lens=(9000, 0, 40, 2500), q_len=3, sink=3.0),
    GqaCase(name="split, head dim 512", seq_lens=(4001,), head_dim=512, kv_heads=1, group=5),
    GqaCase(name="131072 tokens", seq_lens=(131072,), head_dim=64, kv_heads=1, page_size=128),
)

CASES = (*FLASHINFER_CASES, *DRAFT_CASES, *EDGE_CASES, *NUMBER_CASES)
