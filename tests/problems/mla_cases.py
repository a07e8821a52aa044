"""MLA decode problems for every backend: of the entry points, of the wrapper, of xqa_mla."""

from __future__ import annotations

from itertools import product
from typing import Any

from tests.problems.batch_mla import batch_case
from tests.problems.mla import KINDS, SEPARATE_KINDS, SPARSE_KINDS, MlaCase, mla_case
from tests.problems.problem import E4M3

_EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 300)
_PAGES = (1, 3, 8, 16, 24, 32, 64, 100, 128)
_LAYOUTS = ("[P,1,ps,d]", "[P,ps,1,d]", "strided")
_RAGGED: dict[str, Any] = {"seq_lens": (5, 100, 64, 300, 0), "q_lens": (1, 4, 0, 17, 2)}
_DIMS = ((256, 64), (512, 0))


def _around(page_size: int, q_len: int = 1) -> tuple[int, ...]:
    """Return the lengths around a page and around the query."""
    return (0, 1, page_size - 1, page_size, page_size + 1, q_len, 300)


def _has_dims(kind: str, rank: int, rope: int) -> bool:
    """Return whether kernels of a kind have the dims."""
    if kind == "fp8_per_token":
        return (rank, rope) == (512, 64)
    return rank == 512 or "fp8_" not in kind


# Of one kind and of every kind.
_BF16 = (
    *(MlaCase(page_size=p, seq_lens=(*_EDGES, p - 1, p, p + 1)) for p in _PAGES),
    *(
        MlaCase(heads=heads, seq_lens=(0, 5, 130), seed=heads)
        for heads in (1, 3, 8, 15, 16, 17, 24, 32, 33, 48, 63, 64, 65, 100, 126, 128, 129, 200, 256)
    ),
    *(
        MlaCase(
            heads=heads,
            q_len=q_len,
            seq_lens=(0, 1, q_len - 1, q_len, q_len + 1, 64 + q_len // 2, 200),
            with_sinks=True,
            seed=q_len,
        )
        for heads, q_len in ((1, 2), (1, 33), (3, 7), (16, 2), (16, 4), (24, 3), (128, 2), (128, 4))
    ),
    *(
        mla_case(
            kind,
            kv_lora_rank=rank,
            page_size=page,
            heads=heads,
            seq_lens=(0, 1, 33, 70, 257),
            with_sinks=True,
            output_scale=0.7,
        )
        for kind, rank, page, heads in product(
            ("bf16", "fp16"), (512, 256), (1, 16, 64), (8, 30, 128)
        )
    ),
    MlaCase(seq_lens=(5000,)),
    MlaCase(seq_lens=(5000, 1), heads=128, with_sinks=True),
    MlaCase(seq_lens=(9000, 0, 40, 2500), heads=5, q_len=3, with_sinks=True),
    mla_case("fp16", seq_lens=(7001,), kv_lora_rank=256),
    MlaCase(seq_lens=(0, 0, 0), with_sinks=True),
    MlaCase(seq_lens=(700,), query_magnitude=30.0, heads=128),
    MlaCase(seq_lens=(200,), score_scale=0.0),
    MlaCase(seq_lens=(200,), score_scale=-0.05),
    *(
        MlaCase(seq_lens=(1, 64, 200), cache_layout=layout, page_size=page)
        for layout, page in product(_LAYOUTS, (1, 64))
    ),
    MlaCase(seq_lens=(4000, 33), q_lens=(3, 1), heads=128, with_sinks=True),
    MlaCase(seq_lens=(5000, 40), values="other pages", heads=128),
    mla_case(
        "e4m3",
        seq_lens=(70, 3, 0),
        values="other cache",
        output_scale=0.5,
        bmm2_scales_scores=True,
        heads=128,
    ),
    MlaCase(seq_lens=(5000, 70), bias="for each head"),
    MlaCase(seq_lens=(5, 100, 64), q_lens=(3, 9, 0), bias="one for all heads"),
    MlaCase(top_k=64, with_top_k_lens=True, qk_rope_head_dim=0, seq_lens=(100, 3)),
    MlaCase(top_k=64, cache_layout="strided", seq_lens=(100, 3), page_size=16),
)
_PAGED: list[dict[str, Any]] = [
    *(
        {
            "page_size": page,
            "heads": heads,
            "q_len": q_len,
            "seq_lens": _around(page, q_len),
            "with_sinks": q_len > 1,
            "output_scale": 0.7,
            "seed": page,
        }
        for page, heads, q_len in ((1, 8, 1), (24, 16, 3), (32, 24, 2), (64, 128, 1), (128, 5, 4))
    ),
    _RAGGED,
    {"seq_lens": (5000, 1), "page_size": 32},
    *({"seq_lens": (1, 64, 200), "cache_layout": layout, "page_size": 16} for layout in _LAYOUTS),
    *(
        {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "seq_lens": (0, 70, 257), "page_size": 32}
        for rank, rope in _DIMS
    ),
]
_APART: list[dict[str, Any]] = [
    {
        "seq_lens": (0, 1, 40, 130, 3),
        "q_lens": (2, 1, 17, 5, 7),
        "page_size": page,
        "separate_rope": True,
        "flat_tables": True,
        "is_causal": is_causal,
        "cache_layout": layout,
    }
    for is_causal, page, layout in ((True, 1, "3-D"), (False, 16, "strided"), (False, 1, "3-D"))
]
_SEPARATE: list[dict[str, Any]] = [
    {
        "seq_lens": _around(page, q_len),
        "q_len": q_len,
        "page_size": page,
        "values": where,
        "with_sinks": True,
    }
    for where, (page, q_len) in product(("other pages", "other cache"), ((16, 1), (64, 2), (24, 1)))
]
_BIASED: list[dict[str, Any]] = [
    {
        "seq_lens": (0, 1, 33, 64, 200),
        "q_len": 3,
        "bias": bias,
        "is_causal": is_causal,
        "with_sinks": is_causal,
    }
    for bias, is_causal in (("one for all heads", True), ("for each head", False))
]
_SPARSE: list[dict[str, Any]] = [
    *(
        {
            "top_k": top_k,
            "page_size": page,
            "heads": heads,
            "q_len": q_len,
            "seq_lens": (0, 1, top_k - 1, top_k, top_k + 1, 2 * top_k),
            "with_sinks": q_len > 1,
            "seed": top_k,
        }
        for top_k, page, heads, q_len in (
            (1, 64, 16, 1),
            (100, 32, 16, 2),
            (128, 64, 64, 1),
            (130, 24, 128, 1),
        )
    ),
    {"top_k": 128, "with_top_k_lens": True, "q_len": 2, "seq_lens": (0, 1, 70, 300)},
    {"top_k": 70, "seq_lens": (5, 100, 9), "q_lens": (3, 0, 9)},
    *({"top_k": 2048, "seq_lens": (3000, 17), "heads": heads} for heads in (16, 128)),
    *({"top_k": 2176, "seq_lens": (2051, 17), "heads": h, "qk_rope_head_dim": 0} for h in (8, 64)),
]

CASES = (
    *_BF16,
    *(
        mla_case(kind, **facts)
        for kinds, some in (
            (KINDS, _PAGED),
            ([kind for kind in KINDS if "fp8_" not in kind], _APART),
            (SEPARATE_KINDS, _SEPARATE),
            (("bf16", "fp16", "e4m3", "fp8_per_token"), _BIASED),
            (SPARSE_KINDS, _SPARSE),
        )
        for kind, facts in product(kinds, some)
        if _has_dims(kind, facts.get("kv_lora_rank", 512), facts.get("qk_rope_head_dim", 64))
    ),
)

# The float64 results take gigabytes.
LONG_CASES = (MlaCase(seq_lens=(131072,), heads=8, page_size=128),)

# Query and KV lengths of a sequence: zero, fewer KV than query, page edges, one long among short.
_SEQS = ((1, 0), (3, 1), (7, 3), (5, 11), (0, 9), (17, 17), (1, 33), (11, 16), (2, 97), (1, 64))
_TWO_SCALES = KINDS["bf16 over e4m3 with two scales"]
_TOKEN_SCALES = KINDS["bf16 over e4m3 with scales for 128 elements"]
_BATCH_KINDS: tuple[dict[str, Any], ...] = (
    *(KINDS["bf16"], KINDS["fp16"], {"kv_lora_rank": 256}, {"qk_rope_head_dim": 0}),
    *(
        scales | rope
        for rope in ({}, {"qk_rope_head_dim": 0})
        for scales in (_TWO_SCALES, _TOKEN_SCALES)
    ),
)

BATCH_CASES = (
    *(
        batch_case(
            _SEQS, page_size=page, heads=16 if page == 16 else 5, is_causal=is_causal, **facts
        )
        for facts, page, is_causal in product(_BATCH_KINDS, (1, 16), (True, False))
    ),
    *(
        batch_case(
            ((q_len, kv_len),) * batch,
            heads=heads,
            page_size=page,
            is_causal=is_causal,
            **KINDS["fp16"],
        )
        for batch, q_len, kv_len, heads, page, is_causal in (
            (1, 1, 514, 64, 1, True),
            (3, 3, 33, 16, 1, False),
            (5, 1, 0, 16, 16, True),
            (7, 5, 17, 16, 32, True),
            (3, 9, 96, 16, 16, False),
            (1, 15, 114, 64, 1, True),
        )
    ),
    batch_case(((1, 8736), (3, 11), (1, 0), (2, 79)), heads=16),
    batch_case(((2, 8736), (1, 79)), page_size=64, heads=8),
    *(
        batch_case(((2, 200),), query_magnitude=scale, **facts)
        for scale, facts in product((0.01, 20.0), (KINDS["bf16"], _TWO_SCALES))
    ),
)

XQA_MLA_CASES = (
    *(
        MlaCase(
            page_size=page,
            cache_layout=layout,
            values=values,
            dtype=E4M3,
            heads=128,
            seq_lens=(0, 2, page - 1, page, page + 1, 514),
            score_scale=scale * 192**-0.5,
            output_scale=scale,
            bmm2_scales_scores=True,
        )
        for page, layout, values, scale in (
            (16, "[P,ps,1,d]", "other cache", 1.0),
            (32, "[P,ps,1,d]", "shared", 0.5),
            (32, "[P,1,ps,d]", "other cache", 0.5),
            (64, "[P,1,ps,d]", "shared", 1.0),
            (64, "3-D", "other cache", 0.5),
            (128, "3-D", "shared", 0.5),
            (128, "strided", "other cache", 0.5),
            (48, "strided", "shared", 1.0),
        )
    ),
    *(
        mla_case(
            kind,
            heads=heads,
            values=values,
            seq_lens=(2, 15, 256, 514, 2048),
            output_scale=0.5,
            bmm2_scales_scores=True,
        )
        for kind in ("bf16", "fp16", "e4m3")
        for heads, values in ((1, "shared"), (20, "other cache"), (128, "shared"))
    ),
)
