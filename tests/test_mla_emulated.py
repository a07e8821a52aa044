"""The MLA kernels on the CPU: their own source, with fibers for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.common import launchers
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla import tensor_maps as mla_maps
from mlagen.runtime.semaphores import new_schedule_id
from mlagen.settings import current_settings
from mlagen.spec.dtype import ROW_FORMATS, DType
from mlagen.spec.mla.sm90 import (
    SCHED_META_BYTES,
    SCHED_META_OFFSET,
    SEMAPHORE_BYTES,
)
from tests.emulator.emulated import COMPILER, Emulated, encode, replace_launches
from tests.emulator.mla_calls import computed, record_kernels, words_beside_workspace
from tests.families.launches import record_launches
from tests.kernels import SM_80, SM_90A
from tests.launch_repeats import SEQ_WORD
from tests.problems.entry_points import decode_with_lse
from tests.problems.extremes import (
    SCALE_STEPS,
    assert_zero_rope_changes_nothing,
    extreme_sinks,
    latent_part,
    listed,
    widened,
    with_extreme_numbers,
    with_scale_steps,
)
from tests.problems.mla import MlaCase, MlaProblem, mla_case
from tests.problems.problem import POISON
from tests.sm90_tiles import smaller_tiles

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

_MAX_BLOCKS = 114


def given(kind: str, name: str, sm_count: int = 1, **facts: Any) -> Emulated[MlaCase]:
    """Return a case of one of the kinds of rows."""
    return Emulated(mla_case(kind, name=f"{kind}, {name}", **facts), sm_count)


PACKED = "bf16 over fp8_ds_mla"
PACKED_FP8 = "e4m3 over fp8_ds_mla"
# So many that a thread counts the work of several; most have none.
MANY = tuple((i % 50 == 7) * (65 + i % 3 * 64) for i in range(530))
MANY_Q = tuple((i % 50 == 7) * (1 + i % 2 * 30) for i in range(530))
# A rank that has more tokens than its causal lengths have.
RANK = {"cp_world": 3, "cp_rank": 1, "tokens_ahead": 2}
NO_ROPE = {"qk_rope_head_dim": 0, "with_sinks": True}
_NO_ROPE: dict[str, Any] = {"qk_rope_head_dim": 0, "seq_lens": (300, 17, 0, 129)}
# Each page size is a kernel of its own, of which there is one for each way of copying.
CASES = [
    given("bf16", "64 rows", heads=64, seq_lens=(300, 17, 0)),
    given("bf16", "16 rows", heads=7, seq_lens=(300, 0, 129), page_size=48),
    given("fp16", "32 rows", heads=16, seq_lens=(130, 1), q_len=2, with_sinks=True, page_size=16),
    given("bf16", "2 members", 2, heads=100, seq_lens=(80,)),
    given("bf16", "ragged, parts apart", seq_lens=(70, 5), q_lens=(3, 1), separate_rope=True),
    given("bf16", "two splits, 64 rows", 2, heads=64, seq_lens=(600,)),
    given("bf16", "two splits, 16 rows", 2, heads=16, seq_lens=(900,), with_sinks=True),
    given("bf16", "two splits, a tile, 64 rows", 2, heads=64, seq_lens=(500, 200)),
    given("bf16", "two splits, a tile, 16 rows", 2, heads=9, seq_lens=(500, 200), with_sinks=True),
    given("bf16", "many splits, 64 rows", 7, heads=64, seq_lens=(900, 70)),
    given("bf16", "many splits, 16 rows", 8, heads=9, seq_lens=(1500, 300), with_sinks=True),
    given("bf16", "splits whose fragments four warps share", 34, heads=16, seq_lens=(4300,)),
    given("e4m3", "splits whose fragments eight warps share", 33, heads=7, seq_lens=(4200,)),
    given("e4m3", "splits whose fragments two warps share", 6, heads=7, seq_lens=(900,)),
    given("bf16", "78 SMs, groups of four", 78, heads=128, q_len=2, seq_lens=(130, 2, 70, 0, 65)),
    given("e4m3", "114 SMs", 114, heads=33, seq_lens=(400, 7, *[130] * 27)),
    given("bf16", "large scores, 16 rows", heads=16, seq_lens=(300, 70), query_magnitude=10.0),
    given("bf16", "large scores, 64 rows", heads=64, seq_lens=(300, 70), query_magnitude=10.0),
    given("e4m3", "64 rows", heads=64, seq_lens=(300, 17, 0)),
    given("e4m3", "two splits, 64 rows", 2, heads=64, seq_lens=(600,)),
    given("e4m3", "two splits, 16 rows", 2, heads=16, seq_lens=(900,), with_sinks=True),
    given("e4m3", "two splits, a tile, 64 rows", 2, heads=64, seq_lens=(500, 200)),
    given("e4m3", "two splits, a tile, 16 rows", 2, heads=9, seq_lens=(500, 200), with_sinks=True),
    given("e4m3", "many splits, 64 rows", 7, heads=64, seq_lens=(900, 70)),
    given("e4m3", "many splits, 32 rows", 8, heads=17, seq_lens=(1500, 300), with_sinks=True),
    given("e4m3", "large scores", heads=16, seq_lens=(300, 70), query_magnitude=10.0),
    given(PACKED, "large scores", heads=16, seq_lens=(300, 70), query_magnitude=10.0),
    given(
        PACKED, "large scores, lists", heads=64, top_k=190, seq_lens=(300, 70), query_magnitude=10.0
    ),
    given("e4m3", "more requests than threads", 5, heads=7, seq_lens=MANY),
    given("e4m3", "more ragged requests than threads", 3, heads=3, seq_lens=MANY, q_lens=MANY_Q),
    given("bf16 over e4m3", "very large scores", heads=40, seq_lens=(300,), query_magnitude=100.0),
    given(PACKED, "many splits, 64 rows", 5, heads=64, top_k=500, seq_lens=(600, 300)),
    given(PACKED, "many splits, 16 rows", 6, heads=16, seq_lens=(900, 70)),
    given("e4m3", "16 rows", heads=7, seq_lens=(700, 0, 129)),
    given("e4m3", "32 rows", heads=16, seq_lens=(330, 5), q_len=2, with_sinks=True, page_size=16),
    given("e4m3", "2 members", 2, heads=100, seq_lens=(80,)),
    given("e4m3", "ragged, parts apart", seq_lens=(70, 5), q_lens=(3, 1), separate_rope=True),
    given(PACKED, "lists, 64 rows", heads=64, top_k=200, seq_lens=(300, 17, 0, 64)),
    given(PACKED, "lists, 16 rows", heads=7, top_k=130, seq_lens=(300, 17, 0, 129)),
    given(PACKED, "lists, 2 members", 2, heads=100, top_k=70, seq_lens=(80,), q_len=2),
    given(PACKED, "lists of given lengths", top_k=128, with_top_k_lens=True, seq_lens=(90, 300)),
    given(PACKED, "ragged lists", top_k=70, seq_lens=(5, 100, 9), q_lens=(3, 0, 2), heads=33),
    given(PACKED, "pages, 64 rows", heads=40, seq_lens=(300, 0, 65), q_len=2, with_sinks=True),
    given(PACKED, "pages, 32 rows", heads=16, seq_lens=(130, 1), q_len=2, page_size=3),
    given(PACKED, "lists of some", heads=40, top_k=100, seq_lens=(150, 3)),
    given(PACKED, "pages, strided", seq_lens=(70, 200), cache_layout="strided"),
    given("e4m3", "lists, 64 rows", heads=64, top_k=200, seq_lens=(300, 17, 0, 64)),
    given("e4m3", "lists, 16 rows", heads=7, top_k=130, seq_lens=(300, 129), page_size=24),
    given("e4m3", "pages of any size", heads=16, seq_lens=(130, 1), q_len=2, page_size=3),
    given("fp8_per_token", "64 rows", 2, heads=40, seq_lens=(300, 0, 65), q_len=2, with_sinks=True),
    given("fp8_per_token", "16 rows", heads=7, seq_lens=(300, 17, 129)),
    given("fp8_per_token", "ragged", 2, seq_lens=(70, 5), q_lens=(3, 1), heads=10),
    given("fp8_per_token", "many splits", 6, heads=24, seq_lens=(900, 70), query_magnitude=10.0),
    given("fp8_per_token", "very large scores", heads=7, seq_lens=(300,), query_magnitude=100.0),
    given(PACKED, "no scale", heads=16, seq_lens=(70, 5), q_len=2, page_size=3, score_scale=0.0),
    given(PACKED, "negative scale, lists", heads=64, top_k=130, seq_lens=(100,), score_scale=-0.05),
    given("fp8_per_token", "negative scale", heads=7, seq_lens=(70, 2), q_len=3, score_scale=-0.05),
    given("e4m3", "no scale, lists", heads=64, top_k=130, seq_lens=(100,), score_scale=0.0),
    given(PACKED_FP8, "lists, 64 rows", heads=64, top_k=200, seq_lens=(300, 17, 0, 64)),
    given(PACKED_FP8, "lists, 32 rows", 2, heads=17, top_k=70, seq_lens=(80, 9), with_sinks=True),
    given(PACKED_FP8, "pages, 64 rows", heads=40, seq_lens=(300, 0, 65), q_len=2, page_size=3),
    given(PACKED_FP8, "ragged, 16 rows", 5, heads=7, seq_lens=(900, 70), q_lens=(2, 1)),
    given(PACKED_FP8, "very large scores", heads=7, seq_lens=(300,), query_magnitude=100.0),
    *(
        given(kind, f"{rows} rows, lists without rope", 2, heads=rows, top_k=140, **_NO_ROPE)
        for kind, rows in (
            *((PACKED, 32), (PACKED, 64), (PACKED_FP8, 16)),
            *(("bf16 over e4m3", 16), ("e4m3", 32)),
        )
    ),
    *(
        given(kind, f"{heads} heads, pages without rope", 3, heads=heads, q_len=3, **_NO_ROPE)
        for kind, heads in ((PACKED, 3), (PACKED, 17), (PACKED_FP8, 10))
    ),
    given("bf16 over e4m3", "pages without rope", 5, heads=40, page_size=3, **_NO_ROPE),
    given(
        "bf16 over e4m3 with scales for 128 elements",
        "no rope",
        2,
        heads=40,
        page_size=3,
        **_NO_ROPE,
    ),
    given("e4m3", "pages of any size without rope", heads=40, page_size=3, **_NO_ROPE),
    given("bf16", "lists, 64 rows", heads=64, top_k=200, seq_lens=(300, 17, 0, 64)),
    given("bf16", "lists, 16 rows", heads=7, top_k=2176, seq_lens=(2100, 17, 0, 129)),
    given("fp16", "lists, 32 rows", 3, heads=17, top_k=130, seq_lens=(600,), q_len=2, page_size=3),
    given("bf16", "lists, 2 members", 2, heads=100, top_k=70, seq_lens=(80,), q_len=2),
    given("bf16", "lists of given lengths", top_k=128, with_top_k_lens=True, seq_lens=(90, 300)),
    given("bf16", "ragged lists", 3, top_k=1, seq_lens=(5, 100, 9), q_lens=(3, 0, 2), heads=33),
    given("bf16", "lists, parts apart", 2, top_k=70, seq_lens=(150, 3), separate_rope=True),
    given("bf16", "large scores, lists", heads=64, top_k=190, seq_lens=(9,), query_magnitude=10.0),
    given("bf16", "many splits, lists, 64 rows", 5, heads=64, top_k=500, seq_lens=(600, 300)),
    given("bf16", "many splits, lists, 16 rows", 6, heads=9, top_k=900, seq_lens=(900, 70)),
    given("bf16 over e4m3", "lists", top_k=100, seq_lens=(150, 3), heads=64),
    given("bf16 over e4m3 with two scales", "ragged", seq_lens=(70, 5), q_lens=(3, 1)),
    given(
        "bf16 over e4m3 with scales for 128 elements",
        "parts apart",
        seq_lens=(40, 130),
        q_lens=(1, 5),
        page_size=1,
        separate_rope=True,
        flat_tables=True,
        is_causal=False,
    ),
    given("bf16", "no rope, 64 rows", 2, heads=64, seq_lens=(900, 17, 0), **NO_ROPE),
    given("bf16", "no rope, 16 rows", 3, heads=7, seq_lens=(900, 129), **NO_ROPE),
    given("bf16", "no rope, 32 rows", heads=16, seq_lens=(500, 1), q_len=2, **NO_ROPE),
    given("bf16", "no rope, 2 members", 4, heads=100, seq_lens=(300,), **NO_ROPE),
    given("bf16", "no rope, ragged", 2, seq_lens=(70, 5), q_lens=(3, 1), heads=30, **NO_ROPE),
    given("bf16", "no rope, lists, 64 rows", 3, heads=64, top_k=300, seq_lens=(900,), **NO_ROPE),
    given("fp16", "no rope, lists, 32 rows", 3, heads=30, top_k=300, seq_lens=(900,), **NO_ROPE),
    given("bf16", "no rope, lists, 16 rows", 2, heads=7, top_k=1000, seq_lens=(900,), **NO_ROPE),
    given("bf16", "no rope, rank 1 of 3", 2, heads=20, seq_lens=(500, 9), **NO_ROPE | RANK),
    given("e4m3", "no rope, 64 rows", 2, heads=64, seq_lens=(900, 17, 0), **NO_ROPE),
    given("e4m3", "no rope, 16 rows", 3, heads=7, seq_lens=(900, 129), **NO_ROPE),
    given("e4m3", "no rope, 32 rows", heads=16, seq_lens=(500, 1), q_len=2, **NO_ROPE),
    given("e4m3", "no rope, 2 members", 4, heads=100, seq_lens=(300,), **NO_ROPE),
    given("e4m3", "no rope, ragged", 2, seq_lens=(70, 5), q_lens=(3, 1), heads=30, **NO_ROPE),
    given("bf16", "rank 1 of 3, 64 rows", 2, heads=33, seq_lens=(600, 9, 1, 0), q_len=5, **RANK),
    given("bf16", "rank 1 of 3, 16 rows", 5, heads=3, seq_lens=(900, 2), q_lens=(4, 1), **RANK),
    given("e4m3", "rank 1 of 3", 3, heads=3, seq_lens=(500, 3, 70), q_len=3, **RANK),
    given(PACKED, "rank 1 of 3", 2, heads=3, seq_lens=(500, 3), q_len=3, **RANK),
]

_FEW: dict[str, Any] = {"heads": 4, "seq_lens": (70, 3)}
SM80_CASES = [
    given("bf16", "ragged", heads=5, seq_lens=(100, 9, 0), q_lens=(3, 1, 2), with_sinks=True),
    given("fp16", "splits", 8, heads=3, seq_lens=(300, 40), page_size=24),
    given("e4m3", "pages", heads=4, seq_lens=(100, 17), q_len=2, page_size=16),
    given("e4m3", "no rope", 4, qk_rope_head_dim=0, heads=4, seq_lens=(200, 9), with_sinks=True),
    given("bf16 over fp8_ds_mla", "lists", heads=4, top_k=70, seq_lens=(100, 30)),
    given("e4m3 over fp8_ds_mla", "lists", heads=4, top_k=70, seq_lens=(100, 30)),
    *(
        given(kind, "no rope", q_len=2, qk_rope_head_dim=0, **_FEW)
        for kind in ("bf16 over fp8_ds_mla", "e4m3 over fp8_ds_mla")
    ),
    given("fp8_per_token", "pages", heads=4, seq_lens=(70, 30)),
    given("bf16", "parts apart", q_len=2, separate_rope=True, flat_tables=True, **_FEW),
    given("bf16", "values in other pages", values="other pages", with_sinks=True, **_FEW),
    given(
        "e4m3",
        "splits, values in another cache",
        8,
        heads=4,
        seq_lens=(300, 40),
        values="other cache",
        bmm2_scales_scores=True,
    ),
    given("bf16", "a bias for all heads", bias="one for all heads", **_FEW),
    given("bf16", "a bias for each head", bias="for each head", q_len=2, is_causal=False, **_FEW),
    given("bf16 over e4m3 with two scales", "pages", **_FEW),
    given("bf16 over e4m3 with scales for 128 elements", "pages", **_FEW),
    given("bf16", "top-k lengths", q_len=2, top_k=70, with_top_k_lens=True, **_FEW),
    given("bf16", "rank 1 of 3", 4, heads=5, seq_lens=(300, 9, 1, 0), q_lens=(3, 1, 2, 2), **RANK),
]

Decode = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def beside() -> torch.Tensor:
    """Return the words that belong to the workspace, aligned as on a GPU."""
    return words_beside_workspace(_MAX_BLOCKS)


@pytest.fixture
def decoded(beside: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decode]:
    """Return what computes a problem by emulated launches, with the tile for all of its rows."""
    record_launches(monkeypatch)
    monkeypatch.setattr(mla_plan, "new_schedule_id", new_schedule_id)

    def run(
        given: Emulated[MlaCase], problem: MlaProblem, seed: int, **changes: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:

        replace_launches(monkeypatch, mla_plan, sm_count=given.sm_count, seed=seed)
        monkeypatch.setattr(mla_maps, "encode", encode)
        monkeypatch.setattr(launchers, "semaphores_of", lambda *_: beside.data_ptr())
        # What is right is to the rounding of the kernel that computes it.
        monkeypatch.setattr(MlaProblem, "_sm90_arch", SM_90A)
        workspace = torch.full((1 << 24,), 0xFF, dtype=torch.uint8)
        inputs = problem.inputs(return_lse=True, workspace_buffer=workspace, **changes)
        out, lse = computed(inputs, "sm90")
        assert not beside[: SEMAPHORE_BYTES // 4].any()
        assert beside[SEMAPHORE_BYTES // 4 + 1] == 0  # CTAs that missed the cached metadata
        return out, lse

    with smaller_tiles(monkeypatch, enabled=False):
        yield run


@pytest.fixture
def decoded_by_sm80(monkeypatch: pytest.MonkeyPatch) -> Decode:
    """Return what computes a problem by emulated launches of the sm80 kernel."""
    record_launches(monkeypatch, arch=SM_80)

    def run(given: Emulated[MlaCase], problem: MlaProblem) -> tuple[torch.Tensor, torch.Tensor]:

        replace_launches(monkeypatch, mla_plan, sm_count=given.sm_count, seed=0)
        workspace = torch.full((1 << 20,), 0xFF, dtype=torch.uint8)
        inputs = problem.inputs(return_lse=True, workspace_buffer=workspace)
        return computed(inputs, "sm80")

    return run


@pytest.mark.parametrize(
    ("kind", "facts", "block_m"),
    [
        ("bf16", {"seq_lens": (60,), "q_len": 2, "heads": 33}, 16),
        ("bf16", {"seq_lens": (60, 9), "q_lens": (1, 3), "heads": 17, "with_sinks": True}, 16),
        ("bf16", {"seq_lens": (200,), "heads": 33, "top_k": 130}, 16),
        ("e4m3", {"seq_lens": (130,), "heads": 70}, 16),
        ("e4m3", {"seq_lens": (130, 70), "heads": 70}, 32),
        (PACKED, {"seq_lens": (200,), "heads": 70, "top_k": 130}, 16),
        (PACKED, {"seq_lens": (200, 70, 9), "q_lens": (1, 0, 1), "heads": 70, "top_k": 130}, 32),
    ],
)
def test_little_work_takes_tiles_of_few_rows(
    kind: str,
    facts: dict[str, Any],
    block_m: int,
    decoded: Decode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several M tiles per sequence, in one CTA group or in several work tiles."""
    made = given(kind, "little work", 6, **facts)
    problem = made.case.build("cpu")
    taken = record_kernels(monkeypatch)
    with smaller_tiles(monkeypatch, enabled=True):
        problem.check(*decoded(made, problem, 0))

    assert [spec.key_fields()["block_m"] for spec in taken] == [str(block_m)]


@pytest.mark.parametrize("given", CASES, ids=lambda given: given.case.name)
def test_a_kernel_is_right_in_whatever_order_warps_come(
    given: Emulated[MlaCase], decoded: Decode, orders: range
) -> None:
    """Within the tolerance of float64; what may not be read is NaN."""
    problem = given.case.build("cpu")
    for seed in orders:
        problem.check(*decoded(given, problem, seed))


@pytest.mark.parametrize(("sm_count", "base"), [(1, "base2"), (2, "basee"), (7, "base2")])
@pytest.mark.parametrize("q_len", [1, 4], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3", PACKED])
def test_sinks_may_be_any_number(
    kind: str, q_len: int, sm_count: int, base: str, decoded: Decode
) -> None:
    """In a whole work tile, in two splits and in many: also infinite ones, and NaN."""
    made = given(kind, "", sm_count, seq_lens=(500, 0), q_len=q_len, heads=16)
    problem = replace(made.case.build("cpu"), sinks=extreme_sinks("cpu"))
    out, lse = decoded(made, problem, 0, return_lse_base=base)
    problem.check(out, lse, natural=base == "basee")


@pytest.mark.parametrize(
    ("kind", "heads"),
    [("bf16", 3), ("bf16", 40), ("e4m3", 3), (PACKED, 3)],
    ids=["bf16-16 rows", "bf16-64 rows", "e4m3-16 rows", "packed-16 rows"],
)
def test_tokens_of_a_rank_past_the_causal_length_may_be_nan(
    kind: str, heads: int, decoded: Decode
) -> None:
    """Tokens of the rank that no query token attends to have no effect."""
    made = given(kind, "", 2, heads=heads, seq_lens=(200, 70), q_len=1, **RANK | {"cp_rank": 0})
    problem = made.case.build("cpu")
    masked = [
        (seq, at)
        for seq, length in enumerate(made.case.local_lens)
        for at in range(length)
        if not problem.sees(seq, 0, at)
    ]
    for seq, position in masked:
        problem.poison(seq, position)

    out, lse = decoded(made, problem, 0)

    assert masked
    problem.check(out, lse)


REPEATED = [
    given("bf16", "many splits, 64 rows", 7, heads=64, seq_lens=(500, 70, 0)),
    given("bf16", "empty ranges, 16 rows", 8, heads=9, seq_lens=(64, 1, 64), with_sinks=True),
    given("e4m3", "2 members", 4, heads=100, seq_lens=(200, 80)),
    given("e4m3", "whole requests, 16 rows", 2, heads=7, seq_lens=(128, 100)),
    given("e4m3", "more requests than lanes", 3, heads=7, seq_lens=(*range(1, 34), 130)),
    given(PACKED, "lists, 64 rows", 3, heads=64, top_k=200, seq_lens=(300, 17, 64)),
    given("bf16", "lists, 16 rows", 4, heads=9, top_k=400, seq_lens=(500, 17, 130)),
]


@pytest.mark.parametrize("given", REPEATED, ids=lambda given: given.case.name)
def test_scheduler_metadata_is_cached_while_schedule_and_lengths_are_equal(
    given: Emulated[MlaCase], decoded: Decode, beside: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block finds its own, or none does; what is found has the bits of what is worked out."""
    monkeypatch.setattr(mla_plan, "new_schedule_id", lambda: 7)
    problem = given.case.build("cpu")
    lengths = given.case.seq_lens
    other = replace(given.case, seq_lens=(*lengths[1:], lengths[0])).build("cpu")
    first = decoded(given, problem, 0)
    problem.check(*first)

    again = decoded(given, problem, 1)
    other.check(*decoded(given, other, 2))
    back = decoded(given, problem, 3)

    for repeated in (again, back):
        assert torch.equal(repeated[0], first[0])
        assert torch.equal(repeated[1], first[1])
    kept = beside[SCHED_META_OFFSET // 4 :].view(-1, SCHED_META_BYTES // 4)
    kept[:, SEQ_WORD] = -1  # nothing to do
    out = torch.full_like(first[0], 7.0)
    decoded(given, problem, 4, out=out)
    assert torch.equal(out, torch.full_like(out, 7.0))
    monkeypatch.setattr(mla_plan, "new_schedule_id", lambda: 8)
    assert torch.equal(decoded(given, problem, 5)[0], first[0])


@pytest.mark.parametrize("heads", [7, 64])
def test_probabilities_may_stay_in_16_bits(
    heads: int, decoded: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where query and cache are in e4m3: the tolerance is that of fp16."""
    monkeypatch.setenv("MLAGEN_MLA_P_DTYPE", "fp16")
    current_settings.cache_clear()
    made = given("e4m3", "", 2, heads=heads, seq_lens=(300, 17, 0), q_len=2, with_sinks=True)
    problem = made.case.build("cpu")
    problem.check(*decoded(made, problem, 0))
    assert problem.math_dtype is torch.float16


@pytest.mark.parametrize(
    ("kind", "heads"), [("bf16", 16), ("bf16", 64), ("e4m3", 16), (PACKED, 16)]
)
def test_all_scores_of_a_row_may_be_far_below_zero(kind: str, heads: int, decoded: Decode) -> None:
    """A single token has all of the weight, whatever its score."""
    made = given(kind, "", heads=heads, seq_lens=(1, 1), query_magnitude=100.0)
    problem = made.case.build("cpu")
    out, lse = decoded(made, problem, 0)
    assert (lse < -150.0).any()
    problem.check(out, lse)


@pytest.mark.parametrize("kind", ["bf16", "e4m3", PACKED, "fp8_per_token"])
@pytest.mark.parametrize("heads", [4, 16])
def test_a_hidden_token_with_nan_reaches_no_row_that_may_not_see_it(
    heads: int, kind: str, decoded: Decode
) -> None:
    """NaN in the newest token is seen by the last query token and by no other."""
    made = given(kind, "NaN", seq_lens=(100, 64), q_len=4, heads=heads)
    problem = made.case.build("cpu")
    stored = problem.kv_cache.view(torch.uint8)
    for request, length in enumerate(made.case.seq_lens):
        page = int(problem.block_tables[request, (length - 1) // 64])
        stored[page, (length - 1) % 64] = POISON

    out, _ = decoded(made, problem, 0)

    assert out[:, 3].isnan().all()
    expected, _ = decoded(made, made.case.build("cpu"), 1)
    assert torch.equal(out[:, :3], expected[:, :3])


@pytest.mark.parametrize("heads", [7, 17, 64], ids=["16 rows", "32 rows", "64 rows"])
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_without_rope_a_call_is_that_of_a_query_with_zero_rope(
    kind: str, heads: int, decoded: Decode
) -> None:
    """With the same bits, but of e4m3, whose sums tensor cores cut at each MMA."""
    made = given(kind, "", 3, heads=heads, seq_lens=(900, 17), with_sinks=True)
    problem = made.case.build("cpu")
    problem.query[..., 512:] = 0
    expected = decoded(made, problem, 0)

    result = decoded(made, problem, 1, **latent_part(problem))

    assert_zero_rope_changes_nothing(kind, result, expected)


@pytest.mark.parametrize("missing", ["first", "last", "every other", "all"])
@pytest.mark.parametrize(
    ("heads", "kind"), [(16, PACKED), (64, PACKED), (17, "bf16"), (64, "bf16")]
)
def test_entries_that_name_no_token_are_as_if_they_were_not_there(
    heads: int, kind: str, missing: str, decoded: Decode
) -> None:
    """Wherever they are in the list."""
    made = given(kind, "", heads=heads, top_k=130, seq_lens=(200,), with_top_k_lens=False)
    problem = made.case.build("cpu")
    names_nothing = {
        "first": slice(0, 70),
        "last": slice(66, None),
        "every other": slice(1, None, 2),
        "all": slice(None),
    }[missing]
    whole = problem.block_tables
    problem.block_tables[..., names_nothing] = torch.tensor(-1, dtype=torch.int32)
    kept = torch.full_like(whole, -1)
    listed = whole[0, 0][whole[0, 0] >= 0]
    kept[0, 0, : len(listed)] = listed

    out, lse = decoded(made, problem, 0)

    expected, wanted = decoded(made, replace(problem, block_tables=kept), 1)
    assert torch.allclose(out.float(), expected.float(), rtol=2**-6, atol=2**-8)
    assert torch.allclose(lse, wanted, atol=1e-3)
    if missing == "all":
        assert not out.any()


@pytest.mark.parametrize(
    ("kind", "heads", "rope"),
    [
        *((PACKED, heads, 64) for heads in (16, 24, 64)),
        *((PACKED_FP8, heads, 64) for heads in (24, 64)),
        *((PACKED, 24, 0), (PACKED, 64, 0), (PACKED_FP8, 16, 0)),
    ],
)
def test_codes_and_scales_may_be_any_numbers(
    kind: str, heads: int, rope: int, decoded: Decode
) -> None:
    """Also those of rows that are part of wider ones, and NaN of the query stays in its row."""
    facts: dict[str, Any] = {"qk_rope_head_dim": rope, "cache_layout": "strided"}
    made = given(kind, "", heads=heads, seq_lens=(130, 9), **facts)
    problem = with_extreme_numbers(made.case.build("cpu"))
    problem = listed(problem if rope else widened(problem, 656), 192)
    expected = decoded(made, problem, 0)
    problem.check(*expected)
    query = problem.query.float()
    query[0, 0, 3, -1] = query[1, 0, 5, 17] = torch.nan

    out, _ = decoded(made, replace(problem, query=query.to(problem.query.dtype)), 1)

    assert out[0, 0, 3].isnan().all()
    assert out[1, 0, 5].isnan().all()
    out[0, 0, 3], out[1, 0, 5] = expected[0][0, 0, 3], expected[0][1, 0, 5]
    assert torch.equal(out, expected[0])


@pytest.mark.parametrize("steps", SCALE_STEPS)
@pytest.mark.parametrize(("heads", "sm_count"), [(16, 1), (64, 5)])
def test_scales_may_be_of_any_size(heads: int, sm_count: int, steps: str, decoded: Decode) -> None:
    """Units of values become larger with them, and those before do not lose what they had."""
    made = given(PACKED, "", sm_count, heads=heads, seq_lens=(300, 60))
    problem = with_scale_steps(made.case.build("cpu"), steps)
    problem.check(*decoded(made, problem, 0))


def test_where_offsets_go_back_nothing_is_written(decoded: Decode) -> None:
    """There could be more work than positions on the line; and a later call is right."""
    made = given("bf16", "", seq_lens=(70, 9, 5), q_lens=(2, 1, 2), heads=16)
    problem = made.case.build("cpu")
    out = torch.full((5, 16, 512), 7.0, dtype=torch.bfloat16)
    ends = torch.tensor([0, 5, 0, 5], dtype=torch.int32)
    decoded(made, problem, 0, out=out, cum_seq_lens_q=ends)
    assert torch.equal(out, torch.full_like(out, 7.0))
    problem.check(*decoded(made, problem, 0))


@pytest.mark.parametrize("given", SM80_CASES, ids=lambda given: given.case.name)
def test_an_sm80_kernel_is_right_in_whatever_order_warps_come(
    given: Emulated[MlaCase], decoded_by_sm80: Decode
) -> None:
    """Within the tolerance of float64, and no copy is read before its thread has waited for it."""
    problem = given.case.build("cpu")
    problem.check(*decoded_by_sm80(given, problem))


@pytest.mark.parametrize("rope", [64, 0])
def test_a_row_format_is_the_fields_of_its_description(
    rope: int, decoded_by_sm80: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a scale per 64 elements, checks, CPU backend and sm80 kernel follow, unedited."""
    row = replace(ROW_FORMATS[DType.FP8_DS_MLA], group=64)
    monkeypatch.setitem(ROW_FORMATS, DType.FP8_DS_MLA, row)
    facts = {**_FEW, "qk_rope_head_dim": rope, "page_size": 8}  # no other test has these pages
    planted = given("bf16 over fp8_ds_mla", "64 per scale", **facts)
    problem = planted.case.build("cpu")

    assert problem.kv_cache.shape[-1] == 512 + 8 * 4 + rope * 2
    problem.check(*decode_with_lse(problem))
    problem.check(*decoded_by_sm80(planted, problem))
