"""The sm90 GQA kernel: right, and bitwise equal in any order of warps and CTAs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen import engine
from mlagen.families.gqa import dispatch as gqa_call
from mlagen.families.gqa.launch_sm80 import GqaSm80Launcher
from mlagen.families.gqa.launch_sm90 import GqaSm90Launcher
from mlagen.settings import current_settings
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from tests.gqa_problems import E4M3, GqaCase, GqaProblem
from tests.gqa_semantics import decode
from tests.graph_replay import captured
from tests.launch_repeats import delayed_launches, mismatches, nonzero_semaphore_bytes, with_delays
from tests.sm90_tiles import max_heads_per_cta

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)

Delay = Callable[[GqaProblem], torch.Tensor]

# For every tile: one sequence in many splits, some in a few, and many sequences.
TILES: dict[str, dict[str, Any]] = {
    "8 rows": {"group": 8},
    "16 rows": {"group": 16},
    "32 rows": {"group": 8, "q_len": 4},
    "32 rows, e4m3": {"group": 8, "q_len": 4, "kv": "e4m3"},
    "two tiles": {"group": 16, "q_len": 3},
    "a CTA group of one": {"group": 3, "kv_heads": 1},
    "a CTA group of 8": {"group": 2, "kv_heads": 8},
    "two heads per CTA": {"group": 3, "kv_heads": 6, "kv": "e4m3"},
    "four heads per CTA": {"group": 2, "kv_heads": 8, "kv": "e4m3", "head_dim": 64},
}
LENGTHS = {
    "many splits": (20000,),
    "one long, one short": (20000, 2500),
    "few splits": (5000, 77, 900, 64, 0, 1),
    "equal": (1088,) * 32,
    "many sequences": tuple(17 + 67 * i % 911 for i in range(300)),
    "empty sequences": (0,) * 1000,
}
CASES = [
    GqaCase(name=f"{tile}, {name}", seq_lens=lens, sink=2.0, page_size=64, **facts)
    for tile, facts in TILES.items()
    for name, lens in LENGTHS.items()
]
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16, head dim 64": {"dtype": torch.float16, "head_dim": 64, "page_size": 16},
    "head dim 256": {"head_dim": 256, "page_size": 48},
    "e4m3": {"kv": "e4m3", "page_size": 128},
    "e4m3, head dim 64": {"kv": "e4m3", "head_dim": 64, "page_size": 16},
    "e4m3, head dim 256, out too": {"kv": "e4m3", "head_dim": 256, "out_dtype": E4M3},
    "a window, HND": {"window": 300, "layout": "HND", "cache_layout": "stacked"},
}


@pytest.fixture(autouse=True)
def _sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every call of this file use the sm90 kernel, with the max number of heads per CTA."""
    monkeypatch.setenv("MLAGEN_GQA_KERNEL", "sm90")
    current_settings.cache_clear()
    with max_heads_per_cta(monkeypatch):
        yield


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_kernels_are_right(
    case: GqaCase, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel is within the tolerance of float64."""
    problem = replace(case, **variant).build("cuda")
    gqa_call.GQA.cache.clear()
    for kernel in ("sm90", "sm80"):
        monkeypatch.setenv("MLAGEN_GQA_KERNEL", kernel)
        current_settings.cache_clear()

        problem.check(decode(problem))

    kinds = [type(call) for call in gqa_call.GQA.cache.launchers.values()]
    assert kinds == [GqaSm90Launcher, GqaSm80Launcher]


def test_an_empty_block_table() -> None:
    """A block table without columns is not read; every row is zero."""
    problem = GqaCase(name="", seq_lens=(0, 0, 0)).build("cuda")

    assert not decode(problem, block_tables=problem.block_tables[:, :0].contiguous()).any()


def repeat(problem: GqaProblem, repeats: int) -> int:
    """Return the number of repetitions that differ from the first in any bit."""
    out = torch.empty_like(decode(problem))
    arguments = problem.arguments(out=out)

    def compute_again() -> torch.Tensor:
        mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)
        return out

    return mismatches(compute_again, repeats)


@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_ten_thousand_launches_give_the_same_bits(case: GqaCase) -> None:
    """No race between CTAs or warps changes a result."""
    problem = case.build("cuda")

    assert repeat(problem, 10_000) == 0


# Places where warps wait, and the max sleep before each, in nanoseconds.
DELAYS = {
    "  mbarrier_wait(shared_address(&barrier), phase);\n": 2000,
    "      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);": 5000,
    "        combine_partials(params, work_pipeline.at(work_idx, head), work_idx, 0, 0,": 20_000,
    "    smem.work_pipeline.wait_empty(work_idx);\n": 5000,
    "    work_pipeline.wait_full(work_idx + 1);\n": 2000,
    "  store_warp_partial(0, 0, warp, softmax, output, smem);\n": 5000,
    "    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);\n": 5000,
    "    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);\n": 5000,
}


@pytest.fixture(name="delay")
def fixture_delay(monkeypatch: pytest.MonkeyPatch) -> Iterator[Delay]:
    """Make later calls of a problem sleep at random; return the result without delays."""

    def delay(problem: GqaProblem) -> torch.Tensor:
        gqa_call.GQA.cache.clear()
        expected = decode(problem).clone()
        ((call),) = gqa_call.GQA.cache.launchers.values()
        spec = call.decode.spec
        assert isinstance(spec, GqaSm90Spec)
        assert (spec, 0) in engine._loaded
        slow = with_delays(spec, DELAYS, after="  __syncwarp();\n")
        monkeypatch.setitem(engine._loaded, (spec, 0), slow)
        gqa_call.GQA.cache.clear()
        return expected

    yield delay
    gqa_call.GQA.cache.clear()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_delays_change_no_bit(case: GqaCase, delay: Delay) -> None:
    """The result does not depend on the order of warps and CTAs."""
    problem = case.build("cuda")
    expected = delay(problem)

    differing = repeat(problem, delayed_launches(CASES))

    assert differing == 0
    assert torch.equal(decode(problem), expected)


def test_no_copy_overwrites_a_stage_in_use(delay: Delay) -> None:
    """A stage is not overwritten while a warp reads it.

    The race occurs once in 10,000 of these launches if mbarrier arrivals do not wait for ldmatrix.
    """
    problem = next(case for case in CASES if case.name == "16 rows, many sequences").build("cuda")
    expected = delay(problem)

    differing = repeat(problem, 60_000)

    assert differing == 0
    assert torch.equal(decode(problem), expected)


@pytest.mark.parametrize("case", CASES[1::3], ids=str)
def test_a_thousand_replays_keep_the_semaphores_at_zero(case: GqaCase) -> None:
    """A replay needs no memset, since every launch resets its semaphores."""
    problem = case.build("cuda")
    expected = decode(problem).clone()
    arguments = problem.arguments(out=torch.empty_like(expected))
    graph = captured(mlagen.decode.xqa_batch_decode_with_kv_cache, arguments)

    for _ in range(1000):
        graph.replay()

    torch.cuda.synchronize()
    assert torch.equal(arguments["out"], expected)
    assert nonzero_semaphore_bytes() == 0


def test_pdl_waits_for_lengths_of_the_preceding_kernel() -> None:
    """The output of a call is the lengths of the next one, which launches early.

    The first call attends to one token, so its output is that token's value, bit for bit.
    """
    problem = GqaCase(name="", seq_lens=(1000,) * 32, page_size=64).build("cuda")
    lengths = [
        torch.tensor([128 + (i * step) % 873 for i in range(32)], dtype=torch.int32, device="cuda")
        for step in (67, 331)
    ]
    expected = [decode(problem, seq_lens=wanted).clone() for wanted in lengths]
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
    reader = problem.arguments(seq_lens=written.view(torch.int32)[0, 0])
    found = []

    for turn in range(200):
        cache = (keys, values[turn % 2])
        mlagen.decode.xqa_batch_decode_with_kv_cache(kv_cache=cache, **writer)
        found.append(mlagen.decode.xqa_batch_decode_with_kv_cache(**reader))

    assert torch.equal(written.view(torch.int32)[0, 0], lengths[1])
    assert all(torch.equal(out, expected[turn % 2]) for turn, out in enumerate(found))


def test_an_invalid_page_id_does_not_fault() -> None:
    """An invalid page id affects only its own sequence."""
    problem = GqaCase(name="", seq_lens=(700, 300), page_size=64, group=8).build("cuda")
    right = decode(problem)
    for page_id in (-1, -(2**31), 2**31 - 1, len(problem.store.key)):
        tables = problem.block_tables.clone()
        tables[0, 3] = page_id

        out = decode(problem, block_tables=tables)

        assert torch.equal(out[1], right[1])


def test_descending_offsets_write_nothing() -> None:
    """Their work could exceed 32-bit linear block indices; a later call is right."""
    problem = GqaCase(name="", seq_lens=(300,) * 200, q_lens=(2,) * 200, kv_heads=1).build("cuda")
    right = decode(problem)
    out = torch.full_like(right, 7.0)
    ends = torch.tensor([0, 400] * 100 + [0], dtype=torch.int32, device="cuda")

    decode(problem, out=out, q_cu_seq_lens=ends)

    assert torch.equal(out, torch.full_like(out, 7.0))
    assert torch.equal(decode(problem), right)
