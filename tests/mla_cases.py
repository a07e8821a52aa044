"""MLA decode problems for every backend."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from tests.cases import MlaCase

EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 300)
E4M3 = torch.float8_e4m3fn


def edges(page_size: int, q_len: int = 1) -> tuple[int, ...]:
    """Return the lengths around a page and around the query."""
    return (0, 1, page_size - 1, page_size, page_size + 1, q_len, 300)


# Every kind of query and cache: query dtype, cache format, location of the scales.
KINDS = {
    "bf16": (torch.bfloat16, "", ""),
    "fp16": (torch.float16, "", ""),
    "e4m3": (E4M3, "", ""),
    "bf16 over e4m3": (torch.bfloat16, "e4m3", ""),
    "fp16 over e4m3": (torch.float16, "e4m3", ""),
    "bf16 over e4m3 with two scales": (torch.bfloat16, "e4m3", "two"),
    "fp16 over e4m3 with two scales": (torch.float16, "e4m3", "two"),
    "bf16 over e4m3 with scales for 128 elements": (torch.bfloat16, "e4m3", "for 128 elements"),
    "fp16 over e4m3 with scales for 128 elements": (torch.float16, "e4m3", "for 128 elements"),
    "bf16 over fp8_ds_mla": (torch.bfloat16, "fp8_ds_mla", ""),
    "fp16 over fp8_ds_mla": (torch.float16, "fp8_ds_mla", ""),
    "fp8_per_token": (E4M3, "fp8_per_token", ""),
}
SPARSE_KINDS = {
    name: kind for name, kind in KINDS.items() if kind[1] != "fp8_per_token" and not kind[2]
}
SEPARATE_KINDS = {name: kind for name, kind in SPARSE_KINDS.items() if kind[1] != "fp8_ds_mla"}


def case_of_kind(kind: tuple[torch.dtype, str, str], **facts: Any) -> MlaCase:
    """Return a case of one of :data:`KINDS`."""
    dtype, kv_format, scales = kind
    return MlaCase(dtype=dtype, kv_format=kv_format, scales=scales, **facts)


SPARSE_CASES = (
    *(
        case_of_kind(
            kind,
            name=f"{name}, top {top_k}, page {page}, {heads} heads, {q_len} query tokens",
            top_k=top_k,
            page_size=page,
            heads=heads,
            q_len=q_len,
            seq_lens=(0, 1, top_k - 1, top_k, top_k + 1, 2 * top_k),
            with_sinks=q_len > 1,
            seed=top_k,
        )
        for name, kind in SPARSE_KINDS.items()
        for top_k, page, heads, q_len in (
            (1, 64, 16, 1),
            (100, 32, 16, 2),
            (128, 64, 64, 1),
            (130, 24, 128, 1),
        )
    ),
    *(
        case_of_kind(
            kind,
            name=f"{name}, top 128, lengths given",
            top_k=128,
            with_top_k_lens=True,
            q_len=2,
            seq_lens=(0, 1, 70, 300),
        )
        for name, kind in SPARSE_KINDS.items()
    ),
    *(
        case_of_kind(
            kind, name=f"{name}, top 70, ragged", top_k=70, seq_lens=(5, 100, 9), q_lens=(3, 0, 9)
        )
        for name, kind in SPARSE_KINDS.items()
    ),
    *(
        case_of_kind(
            kind, name=f"{name}, top 2048, split", top_k=2048, seq_lens=(3000, 17), heads=heads
        )
        for (name, kind), heads in product(SPARSE_KINDS.items(), (16, 128))
    ),
    MlaCase(
        name="top 64 without rope",
        top_k=64,
        with_top_k_lens=True,
        qk_rope_head_dim=0,
        seq_lens=(100, 3),
    ),
    MlaCase(
        name="top 64, strided", top_k=64, cache_layout="strided", seq_lens=(100, 3), page_size=16
    ),
)

CASES = (
    *(
        MlaCase(
            name=f"page size {page}", page_size=page, seq_lens=(*EDGES, page - 1, page, page + 1)
        )
        for page in (1, 3, 8, 16, 24, 32, 64, 100, 128)
    ),
    *(
        MlaCase(name=f"{heads} heads", heads=heads, seq_lens=(0, 5, 130), seed=heads)
        for heads in (1, 3, 8, 15, 16, 17, 24, 32, 33, 48, 63, 64, 65, 100, 126, 128, 129, 200, 256)
    ),
    *(
        MlaCase(
            name=f"{q_len} query tokens of {heads} heads",
            heads=heads,
            q_len=q_len,
            seq_lens=(0, 1, q_len - 1, q_len, q_len + 1, 64 + q_len // 2, 200),
            with_sinks=True,
            seed=q_len,
        )
        for heads, q_len in ((1, 2), (1, 33), (3, 7), (16, 2), (16, 4), (24, 3), (128, 2), (128, 4))
    ),
    *(
        MlaCase(
            name=f"{str(dtype)[6:]}, kv_lora_rank {rank}, page {page}, {heads} heads",
            dtype=dtype,
            kv_lora_rank=rank,
            page_size=page,
            heads=heads,
            seq_lens=(0, 1, 33, 70, 257),
            with_sinks=True,
            output_scale=0.7,
        )
        for dtype, rank, page, heads in product(
            (torch.bfloat16, torch.float16), (512, 256), (1, 16, 64), (8, 30, 128)
        )
    ),
    MlaCase(name="long enough to split", seq_lens=(5000,), heads=16),
    MlaCase(name="long enough to split, 128 heads", seq_lens=(5000, 1), heads=128, with_sinks=True),
    MlaCase(
        name="split and ragged", seq_lens=(9000, 0, 40, 2500), heads=5, q_len=3, with_sinks=True
    ),
    MlaCase(name="split, fp16, rank 256", seq_lens=(7001,), dtype=torch.float16, kv_lora_rank=256),
    MlaCase(name="131072 tokens", seq_lens=(131072,), heads=8, page_size=128),
    MlaCase(name="all sequences empty", seq_lens=(0, 0, 0), with_sinks=True),
    MlaCase(name="growing scores", seq_lens=(700,), query_magnitude=30.0, heads=128),
    MlaCase(name="no scale", seq_lens=(200,), score_scale=0.0),
    MlaCase(name="negative scale", seq_lens=(200,), score_scale=-0.05),
    *(
        MlaCase(
            name=f"cache as {cache_layout}",
            seq_lens=(1, 64, 200),
            cache_layout=cache_layout,
            page_size=page,
        )
        for cache_layout, page in product(("[P,1,ps,d]", "[P,ps,1,d]", "strided"), (1, 16, 64))
    ),
    MlaCase(
        name="ragged queries", seq_lens=(5, 100, 64, 300, 0), q_lens=(1, 4, 0, 17, 2), heads=16
    ),
    MlaCase(
        name="ragged queries, split", seq_lens=(4000, 33), q_lens=(3, 1), heads=128, with_sinks=True
    ),
    *(
        case_of_kind(
            kind,
            name=f"{name}, page {page}, {heads} heads, {q_len} query tokens",
            page_size=page,
            heads=heads,
            q_len=q_len,
            seq_lens=edges(page, q_len),
            with_sinks=q_len > 1,
            output_scale=0.7,
            seed=page,
        )
        for name, kind in KINDS.items()
        for page, heads, q_len in ((1, 8, 1), (24, 16, 3), (32, 24, 2), (64, 128, 1), (128, 5, 4))
    ),
    *(
        case_of_kind(
            kind, name=f"{name}, ragged", seq_lens=(5, 100, 64, 300, 0), q_lens=(1, 4, 0, 17, 2)
        )
        for name, kind in KINDS.items()
    ),
    *(
        case_of_kind(kind, name=f"{name}, split", seq_lens=(5000, 1), heads=16, page_size=32)
        for name, kind in KINDS.items()
    ),
    *(
        case_of_kind(
            kind,
            name=f"{name}, cache as {cache_layout}",
            seq_lens=(1, 64, 200),
            cache_layout=cache_layout,
            page_size=16,
        )
        for (name, kind), cache_layout in product(
            KINDS.items(), ("[P,1,ps,d]", "[P,ps,1,d]", "strided")
        )
    ),
    *(
        case_of_kind(
            kind,
            name=f"{name}, kv_lora_rank {rank}, qk_rope_head_dim {rope}",
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            seq_lens=(0, 70, 257),
            page_size=32,
        )
        for (name, kind), (rank, rope) in product(KINDS.items(), ((256, 64), (512, 0)))
        if not kind[1].startswith("fp8_") and not (kind[0] is E4M3 and rope == 0)
    ),
    *(
        case_of_kind(
            kind,
            name=f"{name}, separate rope, {'causal' if is_causal else 'all'}, page {page}",
            seq_lens=(0, 1, 40, 130, 3),
            q_lens=(2, 1, 17, 5, 7),
            page_size=page,
            separate_rope=True,
            flat_tables=True,
            is_causal=is_causal,
            cache_layout=cache_layout,
        )
        for name, kind in KINDS.items()
        for is_causal, page, cache_layout in (
            (True, 1, "3-D"),
            (False, 16, "strided"),
            (False, 1, "3-D"),
        )
        if not kind[1].startswith("fp8_")
    ),
    *(
        case_of_kind(
            kind,
            name=f"{name}, values in {where}, page {page}",
            seq_lens=edges(page, q_len),
            q_len=q_len,
            page_size=page,
            values=where,
            with_sinks=True,
        )
        for (name, kind), where in product(SEPARATE_KINDS.items(), ("other pages", "other cache"))
        for page, q_len in ((16, 1), (64, 2), (24, 1))
    ),
    MlaCase(
        name="values in other pages, split", seq_lens=(5000, 40), values="other pages", heads=128
    ),
    MlaCase(
        name="scores take both scales",
        dtype=E4M3,
        seq_lens=(70, 3, 0),
        values="other cache",
        output_scale=0.5,
        scores_take_bmm2=True,
        heads=128,
    ),
    *(
        case_of_kind(
            kind,
            name=f"{name}, {bias} bias, {'causal' if is_causal else 'all'}",
            seq_lens=(0, 1, 33, 64, 200),
            q_len=3,
            bias=bias,
            is_causal=is_causal,
            with_sinks=is_causal,
        )
        for name, kind in KINDS.items()
        for bias, is_causal in (("one for all heads", True), ("for each head", False))
        if name in {"bf16", "fp16", "e4m3", "fp8_per_token"}
    ),
    MlaCase(name="bias, split", seq_lens=(5000, 70), bias="for each head"),
    MlaCase(name="bias, ragged", seq_lens=(5, 100, 64), q_lens=(3, 9, 0), bias="one for all heads"),
    *SPARSE_CASES,
)
