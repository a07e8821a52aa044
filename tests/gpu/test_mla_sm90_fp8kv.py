"""The Hopper MLA kernel for rows of 8 bits: right, and the same in whatever order warps arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen import engine
from mlagen.api import mla_call
from mlagen.settings import current_settings
from mlagen.spec.mla import MlaSm80Spec
from mlagen.spec.mla_sm90_fp8kv import MlaSm90Fp8KvSpec
from tests.cases import MlaCase
from tests.gpu.test_mla_sm90 import DELAYS
from tests.graph_replay import captured
from tests.hopper_tiles import taking_hopper_kernels
from tests.launch_repeats import counters_left, delayed_launches, mismatches, with_delays
from tests.mla_cases import KINDS, of_kind
from tests.mla_semantics import compute, decode
from tests.uneven_scales import STEPS, with_steps

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

HEADS = {"16 rows": 16, "32 rows": 24, "64 rows": 64, "teams of 2": 128}
LISTS: dict[str, dict[str, Any]] = {
    "lists in few pieces": {"top_k": 2048, "seq_lens": (3000, 2500, 100), "q_len": 2},
    "many lists": {"top_k": 512, "seq_lens": tuple(600 + 37 * i % 500 for i in range(150))},
    "short lists": {"top_k": 130, "seq_lens": (0, 1, 63, 64, 65, 300), "q_len": 3},
}
PAGES: dict[str, dict[str, Any]] = {
    "many pieces": {"seq_lens": (9000,), "with_sinks": True},
    "few pieces": {"seq_lens": (5000, 77, 900, 64, 0, 1), "q_len": 2, "page_size": 16},
    "alike, cut in halves": {"seq_lens": (1088,) * 64, "page_size": 1},
    "many requests": {"seq_lens": tuple(17 + 67 * i % 911 for i in range(200)), "page_size": 48},
}
CASES = (
    [
        of_kind(KINDS[kind], name=f"{kind}, {width}, {name}", heads=heads, **facts)
        for kind in ("bf16 over fp8_ds_mla", "bf16 over e4m3")
        for width, heads in HEADS.items()
        for name, facts in [*LISTS.items(), *PAGES.items()]
    ]
    + [
        of_kind(KINDS[kind], name=f"{kind}, {name}", heads=100, **facts)
        for kind in (
            "bf16 over e4m3 with two scales",
            "bf16 over e4m3 with scales for 128 elements",
        )
        for name, facts in PAGES.items()
    ]
    + [
        of_kind(KINDS[kind], name=f"{kind}, {width}, {name}", heads=heads, **facts)
        for kind, given in (
            ("fp8_per_token", PAGES),
            ("e4m3", {**LISTS, "pages of one token": PAGES["alike, cut in halves"]}),
        )
        for width, heads in HEADS.items()
        for name, facts in given.items()
    ]
)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every call of this file take the sm90 kernel, and the tile for its rows."""
    with taking_hopper_kernels(monkeypatch):
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_kernels_are_right(case: MlaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within the tolerance of float64, so they are within twice that of each other."""
    problem = case.build("cuda")
    mla_call._calls.clear()
    for kernel in ("sm90", "sm80"):
        monkeypatch.setenv("MLAGEN_MLA_KERNEL", kernel)
        current_settings.cache_clear()

        problem.check(*compute(problem))

    kernels = [type(call.decode.spec) for call in mla_call._calls.values()]
    assert kernels == [MlaSm90Fp8KvSpec, MlaSm80Spec]


@pytest.mark.parametrize("facts", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_probabilities_may_stay_in_16_bits(
    heads: int, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where query and cache are in e4m3: the tolerance is that of fp16."""
    monkeypatch.setenv("MLAGEN_MLA_P_DTYPE", "fp16")
    current_settings.cache_clear()
    problem = of_kind(KINDS["e4m3"], name="", heads=heads, **facts).build("cuda")
    mla_call._calls.clear()

    problem.check(*compute(problem))

    assert problem.math_dtype is torch.float16
    (call,) = mla_call._calls.values()
    assert isinstance(call.decode.spec, MlaSm90Fp8KvSpec)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_a_thousand_launches_give_the_same_bits(case: MlaCase) -> None:
    """No race between blocks or warps shows in a result."""
    problem = case.build("cuda")

    assert mismatches(lambda: compute(problem)[0], 1000) == 0


@pytest.mark.parametrize("case", [case for case in CASES[1::5] if case.has_door], ids=str)
def test_a_thousand_replays_leave_the_counters_at_zero(case: MlaCase) -> None:
    """A replay needs no memset, for every launch leaves what it found."""
    problem = case.build("cuda")
    expected = compute(problem)[0].clone()
    arguments = problem.arguments(out=torch.empty_like(expected))
    graph = captured(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla, arguments)

    for _ in range(1000):
        graph.replay()

    torch.cuda.synchronize()
    assert torch.equal(arguments["out"], expected)
    assert counters_left() == 0


_DELAYED = CASES[2::5]  # of every kind, and all of its forms


@pytest.mark.parametrize("case", _DELAYED, ids=str)
def test_delays_change_no_bit(case: MlaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever warp or block comes last, and whatever it finds done, the result is the same."""
    problem = case.build("cuda")
    mla_call._calls.clear()
    expected = compute(problem)[0].clone()
    (call,) = mla_call._calls.values()
    spec = call.decode.spec
    assert isinstance(spec, MlaSm90Fp8KvSpec)
    monkeypatch.setitem(engine._loaded, (spec, 0), with_delays(spec, DELAYS))
    mla_call._calls.clear()

    launches = delayed_launches(_DELAYED)
    differing = mismatches(lambda: compute(problem)[0], launches)
    result = compute(problem)[0]

    mla_call._calls.clear()
    assert differing == 0
    assert torch.equal(result, expected)


@pytest.mark.parametrize("magnitude", [10.0, 100.0])
@pytest.mark.parametrize("kind", ["bf16 over fp8_ds_mla", "bf16 over e4m3"])
@pytest.mark.parametrize("heads", [16, 64])
def test_large_scores_are_right(heads: int, kind: str, magnitude: float) -> None:
    """References move far and often, and the tensor cores cut sums off."""
    case = of_kind(KINDS[kind], name="", seq_lens=(3000, 700, 64), heads=heads, with_sinks=True)
    problem = replace(case, query_magnitude=magnitude).build("cuda")

    problem.check(*compute(problem))


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("heads", [16, 24, 128])
def test_scales_may_be_of_any_size(heads: int, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels are right; the one for Hopper takes units for values, which have to move."""
    kind = KINDS["bf16 over fp8_ds_mla"]
    case = of_kind(kind, name="", seq_lens=(1000, 70, 300), heads=heads, page_size=16)
    problem = with_steps(case.build("cuda"), steps)
    for kernel in ("sm90", "sm80"):
        monkeypatch.setenv("MLAGEN_MLA_KERNEL", kernel)
        current_settings.cache_clear()

        problem.check(*compute(problem))


def test_the_query_may_have_elements_of_any_size() -> None:
    """Each row is divided by a power of two of its own before it is split."""
    case = of_kind(KINDS["bf16 over fp8_ds_mla"], name="", seq_lens=(700,), heads=16)
    problem = case.build("cuda")
    expected = decode(problem).clone()
    sizes = torch.tensor([2.0**e for e in range(-80, 80, 10)], device="cuda", dtype=torch.bfloat16)

    for head, size in enumerate(sizes):
        query = problem.query * size
        out = decode(problem, query=query, bmm1_scale=case.score_scale / size.item())
        assert torch.equal(out[..., head, :], expected[..., head, :])


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("missing", ["first", "last", "every other", "all"])
def test_entries_that_name_no_token_are_skipped(heads: int, missing: str) -> None:
    """Wherever they are, and whatever they are instead."""
    case = of_kind(KINDS["bf16 over fp8_ds_mla"], name="", heads=heads, top_k=300, seq_lens=(700,))
    problem = case.build("cuda")
    names_nothing = {
        "first": slice(0, 130),
        "last": slice(130, None),
        "every other": slice(1, None, 2),
        "all": slice(None),
    }[missing]
    problem.block_tables[..., names_nothing] = -1
    lists = problem.block_tables.flatten()
    wild = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    replaced = torch.where(lists < 0, wild[torch.arange(len(lists), device="cuda") % 3], lists)

    out, lse = compute(problem)
    problem.block_tables.copy_(replaced.view_as(problem.block_tables))
    again, same = compute(problem)

    assert torch.equal(out, again)
    assert torch.equal(lse, same)
    assert bool(out.any()) == (missing != "all")
    assert not out.isnan().any()
