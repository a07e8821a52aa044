"""GQA decode problems for every backend, of the batch entry point and of xqa."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

from tests.problems.gqa import KINDS, SOME_KINDS, GqaCase, gqa_case

# The kinds that FlashInfer tests.
FLASHINFER_KINDS = [
    kind for kind in KINDS if KINDS[kind]["kv"] in {"16-bit", "e4m3"} and "scales" not in kind
]
_BF16, _E4M3 = "bf16 over 16-bit", "bf16 over e4m3"

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
DRAFT_SHAPES = ((2, 32, 2, 4), (4, 64, 4, 2), (5, 16, 2, 8), (4, 32, 2, 16))
RAGGED = ((1, 3, 2, 4), (5, 1, 3, 2), (1, 4, 2, 3), (5, 0, 3, 2))

_kinds = cycle(FLASHINFER_KINDS)
_masks = cycle(("causal", "full", None, "random"))
_layouts = cycle(("NHD", "HND"))
_sinks = cycle((None, 3.0, 3.0))
_cache_layouts = cycle(("tuple", "stacked", "list", "strided", "shared"))


def shape_facts(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the facts of one of :data:`SHAPES`, without the batch."""
    return dict(
        zip(("q_len", "page_size", "kv_heads", "group", "head_dim"), shape[1:], strict=True)
    )


_FLASHINFER = (
    gqa_case(
        kind,
        **shape_facts(shape),
        seq_lens=tuple(110 - index % 7 for index in range(shape[0])),
        window=window,
        sink=next(_sinks),
        mask=next(_masks) if shape[1] > 1 else None,
        layout=next(_layouts),
        cache_layout=next(_cache_layouts),
    )
    for shape, window in product(SHAPES, (0, 128))
    for kind in (next(_kinds), next(_kinds))
)
_DRAFTS = (
    *(
        gqa_case(
            kind,
            **shape_facts((2, *shape, 128)),
            seq_lens=(longest, 300),
            window=window,
            sink=next(_sinks),
            mask=next(_masks),
        )
        for shape, window, (longest, kind) in product(
            DRAFT_SHAPES, (64, 128), ((300, _BF16), (300, _E4M3), (30_000, _BF16))
        )
    ),
    *(
        gqa_case(
            kind,
            seq_lens=(longest, 300, 17, 4),
            q_lens=q_lens,
            window=window,
            sink=next(_sinks),
            mask=next(_masks),
            layout=next(_layouts),
        )
        for q_lens, window, (longest, kind) in product(
            RAGGED, (0, 128), ((300, _BF16), (300, _E4M3), (6_000, _BF16))
        )
    ),
    *(
        gqa_case(
            kind,
            seq_lens=(0, 1, q_len - 1, q_len, q_len + 1, 100 + q_len),
            q_len=q_len,
            mask=mask,
            head_dim=64,
            group=2,
        )
        for (q_len, mask), kind in product(
            (
                *((q_len, "random") for q_len in (2, 5, 31, 32, 33, 64, 70)),
                *((5, mask) for mask in (None, "causal", "full", "blind")),
                *((33, mask) for mask in (None, "blind")),
            ),
            (_BF16, _E4M3),
        )
    ),
    GqaCase(seq_lens=(300, 64, 40, 5, 0), q_lens=(64, 33, 1, 7, 2), mask="random", head_dim=64),
    GqaCase(seq_lens=(5000, 60), q_len=33, mask="random", sink=3.0, head_dim=64),
)
_EDGES = (
    *(
        GqaCase(page_size=p, seq_lens=(0, 1, 2, p - 1, p, p + 1, 63, 64, 65, 300))
        for p in (1, 2, 5, 8, 16, 32, 64, 128)
    ),
    *(
        gqa_case(kind, head_dim=head_dim, seq_lens=(0, 1, 17, 70, 257), sink=3.0)
        for head_dim, kind in product((16, 32, 48, 64, 80, 96, 128, 192, 256, 512), SOME_KINDS)
    ),
    *(
        gqa_case(
            kind, head_dim=head_dim, head_dim_vo=dims, seq_lens=(0, 17, 257), q_len=2, sink=3.0
        )
        for (head_dim, dims), kind in product(((192, 128), (64, 48)), SOME_KINDS)
    ),
    *(
        GqaCase(kv_heads=kv_heads, group=group, q_len=q_len, head_dim=64, seq_lens=(0, 5, 130))
        for (kv_heads, q_len), group in product(
            ((1, 1), (3, 1), (2, 3)), (1, 2, 4, 5, 6, 7, 8, 16, 33, 64)
        )
    ),
    *(
        gqa_case(
            kind,
            window=window,
            q_len=q_len,
            seq_lens=(0, 1, q_len, 15, 16, 17, 200),
            sink=3.0,
            head_dim=64,
        )
        for window, q_len, kind in product(
            (1, 2, 7, 16, 17, 64, 1000, 2**31 - 1), (1, 4), (_BF16, _E4M3)
        )
    ),
    *(
        gqa_case(
            kind,
            seq_lens=(1, 16, 70, 0),
            q_len=2,
            head_dim=64,
            cache_layout=cache_layout,
            layout=layout,
        )
        for cache_layout, layout, kind in product(
            ("tuple", "list", "stacked", "strided", "shared"), ("NHD", "HND"), SOME_KINDS
        )
    ),
)
_NUMBERS = (
    *(
        gqa_case(kind, seq_lens=(70, 3), output_scale=scale, o_scale=0.3)
        for scale, kind in product((0.25, 3.0, -1.5), KINDS)
    ),
    GqaCase(seq_lens=(200,), score_scale=0.0),
    GqaCase(seq_lens=(200,), score_scale=-0.05),
    GqaCase(seq_lens=(700,), query_magnitude=30.0),
    GqaCase(seq_lens=(70, 3, 0), sink=30.0, q_len=2),
    GqaCase(seq_lens=(5000, 3), sink=30.0),
    GqaCase(seq_lens=(0, 0, 0), sink=3.0),
    *(
        gqa_case(kind, seq_lens=(4000, 1), head_dim=64, kv_heads=1, group=8, sink=3.0)
        for kind in KINDS
    ),
    GqaCase(seq_lens=(9000, 0, 40, 2500), q_len=3, sink=3.0),
    GqaCase(seq_lens=(4001,), head_dim=512, kv_heads=1, group=5),
    *(
        gqa_case(kind, **facts, causal=False, kv_heads=1, head_dim=64, sink=3.0)
        for kind in SOME_KINDS
        for facts in (
            {"seq_lens": (0, 1, 4, 70, 3000), "q_len": 5},
            {"seq_lens": (70, 3, 300, 0), "q_lens": (40, 9, 0, 2)},
        )
    ),
    GqaCase(seq_lens=(500,), q_len=96, causal=False),
    # Of scores of about 11, and up to 50, in a kernel that splits and in one that does not.
    *(
        gqa_case(kind, seq_lens=(4000, 70, 0), soft_cap=cap, score_scale=1 / deviation, **facts)
        for cap, facts in (
            (30.0, {"sink": 3.0}),
            (1.0, {"q_len": 3, "window": 50}),
            (1e6, {"group": 16, "head_dim": 256}),
        )
        for kind in SOME_KINDS
        for deviation in [gqa_case(kind, seq_lens=()).deviation]
    ),
    GqaCase(seq_lens=(131072,), head_dim=64, kv_heads=1, page_size=128),
)

_ALL = (*_FLASHINFER, *_DRAFTS, *_EDGES, *_NUMBERS)
CASES = [case for case in _ALL if max(case.seq_lens) <= 10_000]
LONG_CASES = [case for case in _ALL if max(case.seq_lens) > 10_000]  # slow in float64

XQA_CASES = (
    *(
        gqa_case(
            kind,
            seq_lens=(2, 15, 256, 514, 0),
            page_size=page,
            kv_heads=heads,
            group=group,
            head_dim=head_dim,
            window=window,
            sink=None if group == 8 else 3.0,
            layout="NHD" if window else "HND",
            cache_layout="strided" if page == 16 else "tuple",
        )
        for window, (page, heads, group, head_dim), kind in product(
            (0, 256), ((16, 2, 8, 128), (64, 4, 16, 32)), KINDS
        )
    ),
    *(
        GqaCase(seq_lens=(70, 300), q_len=q_len, mask=mask)
        for q_len, mask in ((2, None), (4, "causal"), (5, "full"), (33, "random"))
    ),
    GqaCase(seq_lens=(70, 300, 9), q_lens=(3, 0, 2), mask="random"),
    GqaCase(seq_lens=(70, 2, 9), q_len=4, causal=False),
    GqaCase(seq_lens=(5000, 9), sink=3.0),
)
