"""The edge cases of sparse MLA over two pools, for every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.problems.dsv4 import Dsv4Case
from tests.problems.dsv4_rows import FORMATS, Pages

# Lengths around KV blocks, clamped ones, and requests of padding.
_LENS = (0, 1, 63, 64, 65, 127, 128, 129, -5, 300)
_SHORT = (40, 3)
INLINE = [name for name in FORMATS if "inline" in name]


def case(name: str, **facts: Any) -> Dsv4Case:
    """Return a case with a second pool, unless the facts say otherwise."""
    usual: dict[str, Any] = {
        "seq_lens": _SHORT,
        "extra_lens": (9, 50),
        "extra": Pages(page_size=2, count=40),
    }
    return Dsv4Case(name=name, **usual | facts)


def _alone(name: str, **facts: Any) -> Dsv4Case:
    return case(name, **{"extra_lens": None} | facts)


_LENGTHS = [
    _alone("lengths of one list", seq_lens=_LENS, entries="valid"),
    case("lengths of both", seq_lens=_LENS, extra_lens=_LENS[::-1], top_k=129, extra_top_k=130),
    case("the second list alone", seq_lens=(0, 0, -1), extra_lens=(70, 1, 0), sinks="random"),
    case("both empty", seq_lens=(0, 0), extra_lens=(0, -3), sinks="random"),
    case("lists of odd widths", seq_lens=(37, 300), top_k=37, extra_lens=(1, 211), extra_top_k=211),
    case("lists of one", seq_lens=(1, 0), top_k=1, extra_lens=(1, 1), extra_top_k=1),
    case("long lists", seq_lens=(128, 100), extra_lens=(1024, 700), extra_top_k=1024),
    *(
        case(f"block ends at {n}", seq_lens=(n, 5), extra_lens=(64 - n % 64, 2), entries="valid")
        for n in (1, 33, 63, 64, 65)
    ),
]
_ENTRIES = [
    *(
        case(f"entries {entries}", seq_lens=(100, 5, 64), extra_lens=(70, 64, 1), entries=entries)
        for entries in ("valid", "-1 first", "-1 in the middle", "-1 last", "-1", "invalid")
    ),
    case("one pool twice", shares_pool=True, seq_lens=(60, 128), extra_lens=(90, 128)),
    case("few tokens, many times", swa=Pages(page_size=1, count=3), seq_lens=(128, 60)),
    case("rows of padding", seq_lens=(1, 0), extra_lens=(1, 0), entries="-1", sinks="random"),
]
_PAGES = [
    *(
        case(
            f"pages of {size} and {other}, {padding}",
            swa=Pages(page_size=size, count=4, padding=padding),
            extra=Pages(page_size=other, count=70 if other < 3 else 3, padding=padding),
            seq_lens=(100, 7),
            extra_lens=(30, 80),
        )
        for size, other in ((1, 64), (2, 256), (61, 53), (64, 2), (69, 1), (256, 64))
        for padding in (576, 16)
    ),
    case(
        "pages far apart",
        swa=Pages(page_bytes=7 * 37440),
        extra=Pages(page_size=2, count=40, page_bytes=7 * 1728),
    ),
    *(
        case(
            f"a cut last page, {layout}",
            swa=cut,
            extra=replace(cut, page_size=2, count=40),
            **facts,
        )
        for layout in ("3-D", "HND", "NHD")
        for cut, facts in ((Pages(is_cut=True), {"cache_layout": layout}),)
    ),
    case("one page", swa=Pages(count=1), extra=Pages(count=1, page_size=1), extra_lens=(3, 1)),
]
_SIZES = [
    case("groups far apart", sizes="groups far apart", query_magnitude=2.0**-14),
    case("tokens far apart", sizes="tokens far apart"),
    case("ends of the exponents", sizes="ends", query_magnitude=2.0**-117, entries="valid"),
    case("large rope", sizes="large rope", query_magnitude=0.3),
    *(
        case(f"NaN {what}", nonfinite=what, seq_lens=(3, 2, 70), extra_lens=(2, 3, 0))
        for what in ("code", "scale", "rope", "head")
    ),
]
_HEADS = [
    case(f"{heads} heads", heads=heads, sinks="random") for heads in (1, 5, 8, 17, 32, 64, 65, 128)
]
_FORMS = [
    *(
        case(f"{q_len} query tokens each", q_len=q_len, seq_lens=(40, 3, 0, 128, 70, 7) * 2)
        for q_len in (1, 2, 4, 6)
    ),
    case("[T, 1, K]", lists="[T, 1, K]"),
    case("slices of wider rows", list_stride=8192, lists="[T, 1, K]"),
    case("slices of wider rows, several query tokens", list_stride=300, q_len=2),
]
_FORMS = [replace(each, extra_lens=tuple(range(5, 5 + len(each.seq_lens)))) for each in _FORMS]
_SINKS = [
    case(f"sinks {sinks}", sinks=sinks, seq_lens=(40, 3, 0), extra_lens=(0, 9, 0))
    for sinks in ("zero", "none in some", "all none", "infinite in some", "large")
] + [case("a NaN sink", sinks="NaN in the first", seq_lens=(3,), extra_lens=(2,))]
_OTHERS = [
    case("a factor of the output", output_scale=0.37),
    case("no factor of the scores", score_scale=0.0),
    _alone("many query tokens", seq_lens=tuple(i % 19 for i in range(40)), top_k=16, heads=8),
]
_FORMATS = [
    each
    for name in FORMATS
    if name != "fp8"
    for each in (
        case(name, kv_cache_format=name, seq_lens=_LENS, extra_lens=_LENS[::-1]),
        case(
            f"{name}, pages of 61 and 53",
            kv_cache_format=name,
            swa=Pages(page_size=61, padding=16),
            extra=Pages(page_size=53, padding=16),
            sizes="groups far apart",
            query_magnitude=2.0**-14,
        ),
        case(f"{name}, NaN scale", kv_cache_format=name, nonfinite="scale", seq_lens=(3, 70)),
        _alone(f"{name}, 64 heads", kv_cache_format=name, heads=64, seq_lens=(100, 3)),
    )
]
_INLINE = [
    case(
        f"{name}, pitches {pitch} and {other}, {spare} rows of padding",
        kv_cache_format=name,
        swa=Pages(page_size=size, pitch=pitch, spare_rows=spare, is_cut=True),
        extra=Pages(page_size=2 * size, pitch=other, spare_rows=3 * spare),
    )
    for name in INLINE
    for size, pitch, other, spare in ((32, 528, 544, 5), (3, 544, 1024, 0), (1, 1024, 528, 0))
]
CASES = [
    *(*_LENGTHS, *_ENTRIES, *_PAGES, *_SIZES, *_HEADS, *_FORMS, *_SINKS, *_OTHERS, *_FORMATS),
    *_INLINE,
]
# What the softmax, and the scales of K and V, depend on.
SOFTMAX_CASES = [*_LENGTHS, *_ENTRIES, *_SIZES]

_POOLS: dict[str, Any] = {"swa": Pages(count=40), "extra": Pages(count=60)}
# Both lists: of more CTAs than a GPU has SMs, in splits, and of any length.
_LISTS: dict[str, dict[str, Any]] = {
    "a prefill chunk": {"seq_lens": tuple(i % 130 for i in range(1024)), "extra_lens": None},
    "many lists of 128 + 512": _POOLS
    | {
        "seq_lens": (128,) * 128,
        "extra_lens": tuple(512 - i for i in range(128)),
        "extra_top_k": 512,
    },
    "split lists": _POOLS
    | {
        "seq_lens": (128, 1, 77, 0),
        "extra_lens": (8192, 5000, 1, 8191),
        "extra_top_k": 8192,
        "sinks": "random",
    },
}
LONG_CASES = [
    case(f"{name}, {heads} heads", heads=heads, **facts)
    for name, facts in _LISTS.items()
    for heads in (8, 16, 24, 64, 128)
]
