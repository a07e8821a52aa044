"""The sm90 FP8-KV MLA kernel: right, and bitwise equal in any order of warps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen import engine
from mlagen.families.mla import dispatch as mla_call
from mlagen.settings import current_settings
from mlagen.spec.mla.sm80 import MlaSm80Spec
from mlagen.spec.mla.sm90_fp8kv import MlaSm90Fp8KvSpec
from tests.cases import MlaCase
from tests.gpu.test_mla_sm90 import DELAYS
from tests.graph_replay import captured
from tests.launch_repeats import delayed_launches, mismatches, nonzero_semaphore_bytes, with_delays
from tests.mla_cases import KINDS, case_of_kind
from tests.mla_semantics import compute, decode
from tests.sm90_tiles import sm90_kernels
from tests.uneven_scales import SCALE_STEPS, with_scale_steps

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)

HEADS = {"16 rows": 16, "32 rows": 24, "64 rows": 64, "CTA groups of 2": 128}
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
CASES = (
    [
        case_of_kind(KINDS[kind], name=f"{kind}, {tile}, {name}", heads=heads, **facts)
        for kind in ("bf16 over fp8_ds_mla", "bf16 over e4m3")
        for tile, heads in HEADS.items()
        for name, facts in [*SPARSE.items(), *PAGES.items()]
    ]
    + [
        case_of_kind(KINDS[kind], name=f"{kind}, {name}", heads=100, **facts)
        for kind in (
            "bf16 over e4m3 with two scales",
            "bf16 over e4m3 with scales for 128 elements",
        )
        for name, facts in PAGES.items()
    ]
    + [
        case_of_kind(KINDS[kind], name=f"{kind}, {tile}, {name}", heads=heads, **facts)
        for kind, given in (
            ("fp8_per_token", PAGES),
            ("e4m3", {**SPARSE, "pages of one token": PAGES["equal, in halves"]}),
        )
        for tile, heads in HEADS.items()
        for name, facts in given.items()
    ]
)


@pytest.fixture(autouse=True)
def _sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every call of this file use the sm90 kernel with its default tile."""
    with sm90_kernels(monkeypatch):
        yield


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_kernels_are_right(case: MlaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel is within the tolerance of float64."""
    problem = case.build("cuda")
    mla_call.MLA.cache.clear()
    for kernel in ("sm90", "sm80"):
        monkeypatch.setenv("MLAGEN_MLA_KERNEL", kernel)
        current_settings.cache_clear()

        problem.check(*compute(problem))

    kernels = [type(call.decode.spec) for call in mla_call.MLA.cache.launchers.values()]
    assert kernels == [MlaSm90Fp8KvSpec, MlaSm80Spec]


@pytest.mark.parametrize("facts", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_p_may_stay_in_16_bits(
    heads: int, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an e4m3 query and cache the tolerance is that of fp16."""
    monkeypatch.setenv("MLAGEN_MLA_P_DTYPE", "fp16")
    current_settings.cache_clear()
    problem = case_of_kind(KINDS["e4m3"], name="", heads=heads, **facts).build("cuda")
    mla_call.MLA.cache.clear()

    problem.check(*compute(problem))

    assert problem.math_dtype is torch.float16
    (call,) = mla_call.MLA.cache.launchers.values()
    assert isinstance(call.decode.spec, MlaSm90Fp8KvSpec)


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_a_thousand_launches_give_the_same_bits(case: MlaCase) -> None:
    """No race between CTAs or warps changes a result."""
    problem = case.build("cuda")

    assert mismatches(lambda: compute(problem)[0], 1000) == 0


@pytest.mark.parametrize(
    "case", [case for case in CASES[1::5] if case.has_trtllm_entry_point], ids=str
)
def test_a_thousand_replays_keep_the_semaphores_at_zero(case: MlaCase) -> None:
    """A replay needs no memset, since every launch resets its semaphores."""
    problem = case.build("cuda")
    expected = compute(problem)[0].clone()
    arguments = problem.arguments(out=torch.empty_like(expected))
    graph = captured(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla, arguments)

    for _ in range(1000):
        graph.replay()

    torch.cuda.synchronize()
    assert torch.equal(arguments["out"], expected)
    assert nonzero_semaphore_bytes() == 0


_DELAYED = CASES[2::5]  # of every kind and variant


@pytest.mark.parametrize("case", _DELAYED, ids=str)
def test_delays_change_no_bit(case: MlaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the order of warps and CTAs."""
    problem = case.build("cuda")
    mla_call.MLA.cache.clear()
    expected = compute(problem)[0].clone()
    (call,) = mla_call.MLA.cache.launchers.values()
    spec = call.decode.spec
    assert isinstance(spec, MlaSm90Fp8KvSpec)
    monkeypatch.setitem(engine._loaded, (spec, 0), with_delays(spec, DELAYS))
    mla_call.MLA.cache.clear()

    launches = delayed_launches(_DELAYED)
    differing = mismatches(lambda: compute(problem)[0], launches)
    result = compute(problem)[0]

    mla_call.MLA.cache.clear()
    assert differing == 0
    assert torch.equal(result, expected)


@pytest.mark.parametrize("magnitude", [10.0, 100.0])
@pytest.mark.parametrize("kind", ["bf16 over fp8_ds_mla", "bf16 over e4m3"])
@pytest.mark.parametrize("heads", [16, 64])
def test_large_scores_are_right(heads: int, kind: str, magnitude: float) -> None:
    """Row max updates are large and frequent, and MMAs truncate sums."""
    case = case_of_kind(
        KINDS[kind], name="", seq_lens=(3000, 700, 64), heads=heads, with_sinks=True
    )
    problem = replace(case, query_magnitude=magnitude).build("cuda")

    problem.check(*compute(problem))


@pytest.mark.parametrize("steps", SCALE_STEPS)
@pytest.mark.parametrize("heads", [16, 24, 128])
def test_scales_may_be_of_any_size(heads: int, steps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kernels are right; the sm90 kernel updates its shared scale exponents."""
    kind = KINDS["bf16 over fp8_ds_mla"]
    case = case_of_kind(kind, name="", seq_lens=(1000, 70, 300), heads=heads, page_size=16)
    problem = with_scale_steps(case.build("cuda"), steps)
    for kernel in ("sm90", "sm80"):
        monkeypatch.setenv("MLAGEN_MLA_KERNEL", kernel)
        current_settings.cache_clear()

        problem.check(*compute(problem))


def test_query_elements_may_be_of_any_size() -> None:
    """Each row is divided by a power of two before it is split into two FP8 terms."""
    case = case_of_kind(KINDS["bf16 over fp8_ds_mla"], name="", seq_lens=(700,), heads=16)
    problem = case.build("cuda")
    expected = decode(problem).clone()
    sizes = torch.tensor([2.0**e for e in range(-80, 80, 10)], device="cuda", dtype=torch.bfloat16)

    for head, size in enumerate(sizes):
        query = problem.query * size
        out = decode(problem, query=query, bmm1_scale=case.score_scale / size.item())
        assert torch.equal(out[..., head, :], expected[..., head, :])


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("missing", ["first", "last", "every other", "all"])
def test_invalid_topk_indices_are_skipped(heads: int, missing: str) -> None:
    """Any invalid index at any position is skipped."""
    case = case_of_kind(
        KINDS["bf16 over fp8_ds_mla"], name="", heads=heads, top_k=300, seq_lens=(700,)
    )
    problem = case.build("cuda")
    invalid = {
        "first": slice(0, 130),
        "last": slice(130, None),
        "every other": slice(1, None, 2),
        "all": slice(None),
    }[missing]
    problem.block_tables[..., invalid] = -1
    indices = problem.block_tables.flatten()
    invalid_ids = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    replaced = torch.where(
        indices < 0, invalid_ids[torch.arange(len(indices), device="cuda") % 3], indices
    )

    out, lse = compute(problem)
    problem.block_tables.copy_(replaced.view_as(problem.block_tables))
    again, same = compute(problem)

    assert torch.equal(out, again)
    assert torch.equal(lse, same)
    assert bool(out.any()) == (missing != "all")
    assert not out.isnan().any()
