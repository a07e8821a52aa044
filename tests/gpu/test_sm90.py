"""The sm90 kernels: right, and bitwise equal in any order of warps and CTAs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

from mlagen import engine
from mlagen.families import dispatch
from mlagen.families.common.dispatch import Dispatcher
from tests.graph_replay import captured
from tests.launch_repeats import (
    GQA_DELAYS,
    MLA_DELAYS,
    mismatches,
    nonzero_semaphore_bytes,
    with_delays,
)
from tests.problems.dsv4 import DSV4, Dsv4Case
from tests.problems.dsv4_cases import LONG_CASES
from tests.problems.entry_points import ENTRY_POINTS, EntryPoint, compute, decode_gqa_with_lse
from tests.problems.extremes import (
    SCALE_STEPS,
    assert_zero_rope_changes_nothing,
    latent_part,
    with_scale_steps,
)
from tests.problems.gqa import GqaCase
from tests.problems.mla import KINDS, MlaCase, mla_case
from tests.problems.problem import E4M3, Problem
from tests.sm90_tiles import choose_kernel, launchers_of, max_kv_heads_per_cta, needs_sm90

pytestmark = [needs_sm90, pytest.mark.usefixtures("sm90", "_heads")]

FP8_DS_MLA = "bf16 over fp8_ds_mla"


class Family(NamedTuple):
    """What the tests need to know of a family's calls."""

    calls: Dispatcher
    entry: EntryPoint
    delays: dict[str, int]
    after: str  # each delay


FAMILIES: dict[type, Family] = {
    MlaCase: Family(dispatch.MLA, ENTRY_POINTS["trtllm"], MLA_DELAYS, ""),
    Dsv4Case: Family(dispatch.MLA, DSV4, MLA_DELAYS, ""),
    GqaCase: Family(dispatch.GQA, ENTRY_POINTS["xqa_batch"], GQA_DELAYS, "  __syncwarp();\n"),
}


def launch_of(problem: Any) -> Callable[[], torch.Tensor]:
    """Return a call of a problem, with the same output each time where the entry point takes it."""
    case = problem.case
    if isinstance(case, MlaCase) and not case.has_trtllm_entry_point:
        return lambda: compute(problem)[0]
    entry = FAMILIES[type(case)].entry
    arguments = entry.arguments(problem) | {"out": problem.new_out()}
    return lambda: entry.function(**arguments)


# For every tile: one sequence in many splits, some in a few, and many sequences.
MLA_TILES = {"16 rows": (16, 1), "32 rows": (16, 2), "64 rows": (64, 1), "groups of 2": (128, 1)}
MLA_LENGTHS = {
    "many splits": (9000,),
    "max splits": (16000,),
    "one long, one short": (20000, 2500),
    "few splits": (5000, 77, 900, 64, 0, 1),
    "equal, in equal splits": (1088,) * 32,
    "equal, in halves": (1088,) * 64,
    "two splits, one before another tile": (3000,) * 83,
    "many sequences": tuple(17 + 67 * i % 911 for i in range(300)),
    "empty sequences": (0,) * 1000,
}
MLA_CASES = [
    MlaCase(name=f"{tile}, {name}", seq_lens=lens, heads=heads, q_len=q_len, with_sinks=True)
    for (tile, (heads, q_len)), (name, lens) in product(MLA_TILES.items(), MLA_LENGTHS.items())
]
GQA_TILES: dict[str, dict[str, Any]] = {
    "8 rows": {"group": 8},
    "16 rows": {"group": 16},
    "32 rows": {"group": 8, "q_len": 4},
    "32 rows, e4m3": {"group": 8, "q_len": 4, "kv": "e4m3"},
    "two tiles": {"group": 16, "q_len": 3},
    "a CTA group of one": {"group": 3, "kv_heads": 1},
    "a CTA group of 8": {"group": 2, "kv_heads": 8},
    "two KV heads per CTA": {"group": 3, "kv_heads": 6, "kv": "e4m3"},
    "four KV heads per CTA": {"group": 2, "kv_heads": 8, "kv": "e4m3", "head_dim": 64},
    "8 rows, nvfp4": {"group": 8, "kv": "nvfp4"},
    "four KV heads per CTA, nvfp4": {"group": 2, "kv_heads": 8, "kv": "nvfp4"},
}
GQA_LENGTHS = {
    "many splits": (20000,),
    **{name: MLA_LENGTHS[name] for name in ("one long, one short", "few splits")},
    "equal": (1088,) * 32,
    **{name: MLA_LENGTHS[name] for name in ("many sequences", "empty sequences")},
}
GQA_CASES = [
    GqaCase(name=f"{tile}, {name}", seq_lens=lens, sink=2.0, page_size=64, **facts)
    for (tile, facts), (name, lens) in product(GQA_TILES.items(), GQA_LENGTHS.items())
]
GQA_VARIANTS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.float16, "head_dim": 64, "page_size": 16},
    {"head_dim": 256, "page_size": 48},
    {"kv": "e4m3", "page_size": 128},
    {"kv": "e4m3", "head_dim": 64, "page_size": 16},
    {"kv": "e4m3", "head_dim": 256, "out_dtype": E4M3},
    {"kv": "e5m2", "head_dim": 64, "layout": "HND"},
    {"kv": "int8", "output_scale": 0.02, "dtype": torch.float16},
    {"kv": "nvfp4", "head_dim": 64, "page_size": 16, "cache_layout": "stacked"},
    {"kv": "nvfp4", "head_dim": 256, "page_size": 48, "layout": "HND"},
    {"window": 300, "layout": "HND", "cache_layout": "stacked"},
]
FP8KV_HEADS = {"16 rows": 16, "32 rows": 24, "64 rows": 64, "groups of 2": 128}
SPARSE: dict[str, dict[str, Any]] = {
    "topk in few splits": {"top_k": 2048, "seq_lens": (3000, 2500, 100), "q_len": 2},
    "many query tokens": {"top_k": 512, "seq_lens": tuple(600 + 37 * i % 500 for i in range(150))},
    "small topk": {"top_k": 130, "seq_lens": (0, 1, 63, 64, 65, 300), "q_len": 3},
}
PAGES: dict[str, dict[str, Any]] = {
    "many splits": {"seq_lens": (9000,), "with_sinks": True},
    "few splits": {"seq_lens": (5000, 77, 900, 64, 0, 1), "q_len": 2, "page_size": 16},
    "equal, in halves": {"seq_lens": (1088,) * 64, "page_size": 1},
    "many sequences": {"seq_lens": tuple(17 + 67 * i % 911 for i in range(200)), "page_size": 48},
}
_SOME_PAGES = {name: PAGES[name] for name in ("few splits", "equal, in halves")}
_NO_ROPE = {
    f"{name}, no rope": facts | {"qk_rope_head_dim": 0}
    for name, facts in (SPARSE | _SOME_PAGES).items()
}
_ONE_TOKEN_PAGES = {"pages of one token": PAGES["equal, in halves"]}
FP8KV_CASES = [
    mla_case(kind, name=f"{kind}, {tile}, {name}", heads=heads, **facts)
    for kinds, tiles, given in (
        ((FP8_DS_MLA, "bf16 over e4m3"), FP8KV_HEADS, SPARSE | PAGES | _NO_ROPE),
        (("e4m3 over fp8_ds_mla",), FP8KV_HEADS, SPARSE | _SOME_PAGES | _NO_ROPE),
        ([k for k in KINDS if k.startswith("bf16 over e4m3 with")], {"100 heads": 100}, PAGES),
        (("fp8_per_token",), FP8KV_HEADS, PAGES),
        (("e4m3",), FP8KV_HEADS, SPARSE | _ONE_TOKEN_PAGES),
        (("e4m3",), FP8KV_HEADS, {name: _NO_ROPE[f"{name}, no rope"] for name in SPARSE}),
    )
    for kind, (tile, heads), (name, facts) in product(kinds, tiles.items(), given.items())
]
NO_ROPE_CASES = [
    replace(case, name=f"{case.name}, no rope", qk_rope_head_dim=0) for case in MLA_CASES[::3]
]
_MLA = (*MLA_CASES, *NO_ROPE_CASES)
SPARSE_16BIT_CASES = [
    mla_case(kind, name=f"{kind}, {tile}, {name}", heads=heads, qk_rope_head_dim=rope, **facts)
    for (kind, rope), (tile, heads), (name, facts) in product(
        (("bf16", 64), ("fp16", 64), ("bf16", 0)), FP8KV_HEADS.items(), SPARSE.items()
    )
]
# Each kernel family with cases.
KERNELS: list[tuple[str, MlaCase | GqaCase]] = [
    *(
        ("mla_sm90_fp8" if kind == "e4m3" else "mla_sm90", replace(case, **KINDS[kind]))
        for kind, case in product(("bf16", "fp16", "e4m3"), _MLA)
    ),
    *(("mla_sm90", case) for case in SPARSE_16BIT_CASES),
    *(("mla_sm90_fp8kv", case) for case in FP8KV_CASES),
    *(("gqa_sm90", case) for case in GQA_CASES),
]
DSV4_CASES = [("two pools", case) for case in LONG_CASES]
REPEATED = [
    *((kernel, case) for kernel, case in KERNELS if case.dtype is not torch.float16),
    *DSV4_CASES,
]
DELAYED: list[tuple[str, Any]] = [
    *(("mla_sm90", case) for case in _MLA),
    *(("mla_sm90_fp8", replace(case, dtype=E4M3)) for case in _MLA),
    *(("gqa_sm90", case) for case in GQA_CASES),
    *(("mla_sm90_fp8kv", case) for case in FP8KV_CASES[2::5]),
    *(("mla_sm90", case) for case in SPARSE_16BIT_CASES[::2]),
    *DSV4_CASES,
]


@pytest.fixture
def _heads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make CTAs of GQA calls process the max number of heads."""
    with max_kv_heads_per_cta(monkeypatch):
        yield


def check_both_kernels(case: MlaCase | GqaCase, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fail unless the sm90 and the sm80 kernel are right; return their families."""
    problem: Any = case.build("cuda")
    calls = FAMILIES[type(case)].calls
    families = []
    for kernel in ("sm90", "sm80"):
        choose_kernel(monkeypatch, kernel)
        calls.clear()

        run = decode_gqa_with_lse if isinstance(case, GqaCase) else compute
        problem.check(*run(problem))
        families += [call.decode.spec.family for call in launchers_of(calls)]

    return families


PAGED = [
    *(
        (family, replace(case, page_size=page))
        for (family, case), page in product(KERNELS, (16, 48, 64))
        if family in {"mla_sm90", "mla_sm90_fp8"}
    ),
    *(("mla_sm90_fp8kv", case) for case in FP8KV_CASES),
    *(("gqa_sm90", replace(c, **facts)) for c, facts in product(GQA_CASES, GQA_VARIANTS)),
]


@pytest.mark.parametrize(("family", "case"), PAGED, ids=str)
def test_both_kernels_are_right(
    family: str, case: MlaCase | GqaCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel is within the tolerance of float64."""
    families = check_both_kernels(case, monkeypatch)

    assert families == [family, f"{family[:3]}_sm80"]


@pytest.mark.parametrize("steps", SCALE_STEPS)
@pytest.mark.parametrize("heads", [16, 24, 128])
def test_scales_may_be_of_any_size(heads: int, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels are right; the sm90 kernel updates its shared scale exponents."""
    case = mla_case(FP8_DS_MLA, seq_lens=(1000, 70, 300), heads=heads, page_size=16)
    problem = with_scale_steps(case.build("cuda"), steps)
    for kernel in ("sm90", "sm80"):
        choose_kernel(monkeypatch, kernel)

        problem.check(*compute(problem))


@pytest.mark.parametrize("case", MLA_CASES[::3], ids=str)
@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
def test_without_rope_a_call_is_that_of_a_query_with_zero_rope(kind: str, case: MlaCase) -> None:
    """With the same bits, but of e4m3, whose sums tensor cores cut at each MMA."""
    problem = replace(case, **KINDS[kind]).build("cuda")
    problem.query[..., 512:] = 0

    result = compute(problem, **latent_part(problem))

    assert_zero_rope_changes_nothing(kind, result, compute(problem))


def repeat(problem: Problem, repeats: int) -> int:
    """Return the number of repetitions that differ from the first in any bit."""
    return mismatches(launch_of(problem), repeats)


@pytest.mark.parametrize(("kernel", "case"), REPEATED[::2], ids=str)
def test_repeated_launches_give_the_same_bits(kernel: str, case: Any) -> None:
    """No race between CTAs or warps changes a result."""
    problem = case.build("cuda")

    assert repeat(problem, 1000 if kernel == "mla_sm90_fp8kv" else 10_000) == 0


def slow_down(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Make later calls of a problem sleep at random; return the result without delays."""
    calls, _, delays, after = FAMILIES[type(problem.case)]
    calls.clear()
    expected = launch_of(problem)()
    (call,) = launchers_of(calls)
    spec = call.decode.spec
    assert "sm90" in spec.family
    assert (spec, 0) in engine._loaded
    monkeypatch.setitem(engine._loaded, (spec, 0), with_delays(spec, delays, after=after))
    calls.clear()
    return expected


def check_delayed(problem: Problem, repeats: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail unless launches with delays give the bits of one without."""
    expected = slow_down(problem, monkeypatch)
    launch = launch_of(problem)

    differing = mismatches(launch, repeats)
    result = launch()

    FAMILIES[type(problem.case)].calls.clear()
    assert differing == 0
    assert torch.equal(result, expected)


@pytest.mark.parametrize(("kernel", "case"), DELAYED, ids=str)
def test_delays_change_no_bit(kernel: str, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the order of warps and CTAs: 10,000 launches of each kernel."""
    cases = [each for own, each in DELAYED if own == kernel]

    check_delayed(case.build("cuda"), -(-10_000 // len(cases)), monkeypatch)


def test_no_copy_overwrites_a_stage_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage is not overwritten while a warp reads it.

    The race occurs once in 10,000 of these launches if mbarrier arrivals do not wait for ldmatrix.
    """
    case = next(case for case in GQA_CASES if case.name == "16 rows, many sequences")

    check_delayed(case.build("cuda"), 60_000, monkeypatch)


@pytest.mark.parametrize(
    "case",
    [
        case
        for _, case in REPEATED[1::3]
        if not isinstance(case, MlaCase) or case.has_trtllm_entry_point
    ],
    ids=str,
)
def test_a_thousand_replays_keep_the_semaphores_at_zero(case: Any) -> None:
    """A replay needs no memset, since every launch resets its semaphores."""
    entry = FAMILIES[type(case)].entry
    problem = case.build("cuda")
    expected = entry.run(problem).clone()
    arguments = entry.arguments(problem) | {"out": torch.empty_like(expected)}
    graph = captured(entry.function, arguments)

    for _ in range(1000):
        graph.replay()

    torch.cuda.synchronize()
    assert torch.equal(arguments["out"], expected)
    assert nonzero_semaphore_bytes() == 0
