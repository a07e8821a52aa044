"""Edges of the sm90 kernels: offsets, tables, small calls, and what their options select."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.dispatch import MLA
from mlagen.families.mla import plan as plan_mla_sm90
from mlagen.families.mla.plan import is_small_call
from mlagen.settings import current_settings
from mlagen.spec.mla.sm90 import MlaSm90Fp8KvSpec
from tests.gpu.test_sm90 import FP8_DS_MLA, FP8KV_HEADS, PAGES, repeat
from tests.problems.entry_points import ENTRY_POINTS, EntryPoint, compute, decode, decode_gqa
from tests.problems.extremes import extreme_sinks
from tests.problems.gqa import GqaCase
from tests.problems.mla import KINDS, MlaCase, mla_case
from tests.sm90_tiles import choose_kernel, launchers_of, needs_sm90, smaller_tiles

pytestmark = [needs_sm90, pytest.mark.usefixtures("sm90")]


def _only_spec() -> Any:
    """Return the spec of the one MLA call that is cached."""
    (call,) = launchers_of(MLA)
    return call.decode.spec


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("heads", [16, 128])
def test_more_sequences_than_threads(heads: int, kind: str) -> None:
    """Threads of the scheduler handle several sequences each, some empty or without a query."""
    seqs = range(1100)
    lens = tuple(37 * i % 251 for i in seqs)
    case = mla_case(kind, seq_lens=lens, heads=heads, with_sinks=True)
    ragged = replace(case, q_lens=tuple((i % 7 > 0) + (i % 5 == 0) for i in seqs))
    for each in (case, ragged):
        problem = each.build("cuda")

        problem.check(*compute(problem))


TABLES: list[tuple[str, dict[str, Any]]] = [
    *(("trtllm", {"heads": heads}) for heads in (16, 128)),
    *(("trtllm", {"heads": heads, **KINDS["e4m3"]}) for heads in (16, 128)),
    ("xqa_batch", {}),
]


@pytest.mark.parametrize(("name", "facts"), TABLES, ids=str)
def test_an_empty_block_table(name: str, facts: dict[str, Any]) -> None:
    """A block table without columns is not read; every row is zero."""
    entry = ENTRY_POINTS[name]
    problem = entry.build("cuda", seq_lens=(0, 0, 0), **facts)

    assert not entry.run(problem, block_tables=problem.block_tables[:, :0].contiguous()).any()


@pytest.mark.parametrize(
    ("entry", "facts"),
    [(ENTRY_POINTS["trtllm"], {"heads": 64}), (ENTRY_POINTS["xqa_batch"], {"kv_heads": 1})],
    ids=["mla", "gqa"],
)
def test_descending_offsets_write_nothing(entry: EntryPoint, facts: dict[str, Any]) -> None:
    """Their work could exceed 32-bit linear block indices; a later call is right."""
    problem = entry.build("cuda", seq_lens=(300,) * 200, q_lens=(2,) * 200, **facts)
    right = entry.run(problem)
    out = torch.full_like(right, 7.0)
    ends = torch.tensor([0, 400] * 100 + [0], dtype=torch.int32, device="cuda")

    entry.run(problem, out=out, offsets=ends)

    assert (out == 7.0).all()
    assert torch.equal(entry.run(problem), right)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3"])
def test_a_small_call_uses_the_sm80_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default settings select the sm80 kernel."""
    choose_kernel(monkeypatch, "auto")
    monkeypatch.setattr(plan_mla_sm90, "is_small_call", is_small_call)
    MLA.clear()

    decode(mla_case(kind, seq_lens=(1024, 900)).build("cuda"))

    assert _only_spec().family == "mla_sm80"


@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 128, 2176])
@pytest.mark.parametrize("heads", [16, 24, 64])
def test_topk_indices_may_be_of_any_number(heads: int, top_k: int) -> None:
    """Lists of less than a KV block, of whole ones, and of odd numbers of them."""
    facts: dict[str, Any] = {"heads": heads, "top_k": top_k, "page_size": 3, "q_len": 2}
    problem = mla_case("bf16", seq_lens=(3000, 40, 0), with_top_k_lens=True, **facts).build("cuda")

    problem.check(*compute(problem))

    assert _only_spec().family == "mla_sm90"


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", FP8_DS_MLA, "bf16 over e4m3"])
def test_little_work_uses_a_smaller_tile(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tiles of sixteen rows occupy more SMs than two of 64."""
    problem = mla_case(kind, seq_lens=(1030,), heads=128, with_sinks=True).build("cuda")
    with smaller_tiles(monkeypatch, enabled=True):
        problem.check(*compute(problem))

        assert "sm90" in _only_spec().family
        assert _only_spec().block_m == 16
        assert repeat(problem, 100) == 0


@pytest.mark.parametrize("facts", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("heads", FP8KV_HEADS.values(), ids=FP8KV_HEADS)
def test_p_may_stay_in_16_bits(
    heads: int, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an e4m3 query and cache the tolerance is that of fp16."""
    monkeypatch.setenv("MLAGEN_MLA_P_DTYPE", "fp16")
    current_settings.cache_clear()
    problem = mla_case("e4m3", heads=heads, **facts).build("cuda")
    MLA.clear()

    problem.check(*compute(problem))

    assert problem.math_dtype is torch.float16
    assert isinstance(_only_spec(), MlaSm90Fp8KvSpec)


@pytest.mark.parametrize("magnitude", [10.0, 100.0])
@pytest.mark.parametrize("kind", ["e4m3", FP8_DS_MLA, "bf16 over e4m3"])
@pytest.mark.parametrize("heads", [16, 64])
def test_large_scores_are_right(heads: int, kind: str, magnitude: float) -> None:
    """Row max updates are large and frequent, scores far from zero, and MMAs truncate sums."""
    facts: dict[str, Any] = {"with_sinks": True, "query_magnitude": magnitude}
    problem = mla_case(kind, seq_lens=(3000, 700, 64), heads=heads, **facts).build("cuda")
    out, lse = compute(problem)

    problem.check(out, lse if kind != "e4m3" else None)


SINKS: list[tuple[str, dict[str, Any]]] = [
    *(
        ("mla", {"q_len": q_len, **KINDS[kind]})
        for q_len in (1, 4)
        for kind in ("bf16", "fp16", "e4m3", FP8_DS_MLA, "fp8_per_token")
    ),
    *(("gqa", {"group": 8, "page_size": 64, "kv": kv}) for kv in ("16-bit", "e4m3")),
]


@pytest.mark.parametrize(("name", "facts"), SINKS, ids=str)
@pytest.mark.parametrize("lens", [(70, 1, 0), (9000, 0)], ids=["whole", "splits"])
def test_sinks_may_be_any_number(lens: tuple[int, ...], name: str, facts: dict[str, Any]) -> None:
    """For sinks of any size, infinite or NaN, the result matches float64, in both bases."""
    if name == "gqa":
        grouped = replace(
            GqaCase(seq_lens=lens, **facts).build("cuda"), sinks=extreme_sinks("cuda")
        )
        grouped.check(decode_gqa(grouped))
        return
    problem = replace(MlaCase(seq_lens=lens, **facts).build("cuda"), sinks=extreme_sinks("cuda"))
    for base in ("base2", "basee"):
        result = compute(problem, return_lse_base=base)
        problem.check(*result, natural=base == "basee")


def test_query_elements_may_be_of_any_size() -> None:
    """Each row is divided by a power of two before it is split into two FP8 terms."""
    case = mla_case(FP8_DS_MLA, seq_lens=(700,))
    problem = case.build("cuda")
    expected = decode(problem).clone()
    sizes = torch.tensor([2.0**e for e in range(-80, 80, 10)], device="cuda", dtype=torch.bfloat16)

    for head, size in enumerate(sizes):
        query = problem.query * size
        out = decode(problem, query=query, bmm1_scale=case.score_scale / size.item())
        assert torch.equal(out[..., head, :], expected[..., head, :])


@pytest.mark.parametrize("kind", ["bf16", FP8_DS_MLA])
@pytest.mark.parametrize("heads", [16, 24, 64, 128])
@pytest.mark.parametrize("missing", ["first", "last", "every other", "all"])
def test_invalid_topk_indices_are_skipped(heads: int, missing: str, kind: str) -> None:
    """Any invalid index at any position is skipped."""
    problem = mla_case(kind, heads=heads, top_k=300, seq_lens=(700,)).build("cuda")
    invalid = {
        "first": slice(0, 130),
        "last": slice(130, None),
        "every other": slice(1, None, 2),
        "all": slice(None),
    }[missing]
    problem.block_tables[..., invalid] = -1
    indices = problem.block_tables.flatten()
    invalid_ids = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    others = invalid_ids[torch.arange(len(indices), device="cuda") % 3]
    replaced = torch.where(indices < 0, others, indices)

    out, lse = compute(problem)
    problem.block_tables.copy_(replaced.view_as(problem.block_tables))
    again, same = compute(problem)

    assert torch.equal(out, again)
    assert torch.equal(lse, same)
    assert bool(out.any()) == (missing != "all")
    assert not out.isnan().any()


def test_pdl_waits_for_lengths_of_the_preceding_kernel() -> None:
    """The output of a call is the lengths of the next one, which launches early.

    The first call attends to one token, so its output is that token's value, bit for bit.
    """
    problem = GqaCase(seq_lens=(1000,) * 32, page_size=64).build("cuda")
    lengths = [
        torch.tensor([128 + (i * step) % 873 for i in range(32)], dtype=torch.int32, device="cuda")
        for step in (67, 331)
    ]
    expected = [decode_gqa(problem, seq_lens=wanted).clone() for wanted in lengths]
    values = [wanted.view(torch.bfloat16).repeat(16, 1).view(1, 16, 1, 64) for wanted in lengths]
    keys = torch.zeros_like(values[0])
    written = torch.zeros(1, 8, 64, dtype=torch.bfloat16, device="cuda")
    writer: dict[str, Any] = {
        "query": torch.zeros_like(written),
        "workspace_buffer": torch.empty(1 << 20, dtype=torch.uint8, device="cuda"),
        "block_tables": torch.zeros(1, 1, dtype=torch.int32, device="cuda"),
        "seq_lens": torch.ones(1, dtype=torch.int32, device="cuda"),
        "max_seq_len": 1,
        "out": written,
    }
    call = ENTRY_POINTS["xqa_batch"].function
    reader = problem.arguments(seq_lens=written.view(torch.int32)[0, 0])
    found = []

    for turn in range(200):
        call(kv_cache=(keys, values[turn % 2]), **writer)
        found.append(call(**reader))

    assert torch.equal(written.view(torch.int32)[0, 0], lengths[1])
    assert all(torch.equal(out, expected[turn % 2]) for turn, out in enumerate(found))
