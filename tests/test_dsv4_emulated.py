"""Sparse MLA over two pools on the CPU: the source of the kernels, with fibers for threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from mlagen.families.common import launchers
from mlagen.families.mla import plan as mla_plan
from mlagen.families.mla.args import MlaArgs
from mlagen.mla import trtllm_batch_decode_sparse_mla_dsv4
from mlagen.spec.arch import Arch
from mlagen.spec.mla.sm90 import SEMAPHORE_BYTES
from tests.emulator.emulated import COMPILER, Emulated, replace_launches
from tests.emulator.mla_calls import Results, computed, record_kernels, words_beside_workspace
from tests.families.launches import record_launches
from tests.kernels import SM_80, SM_90A
from tests.problems.dsv4 import Dsv4Case, Dsv4Problem
from tests.problems.dsv4_cases import CASES, SOFTMAX_CASES, case
from tests.problems.dsv4_rows import Pages
from tests.sm90_tiles import smaller_tiles

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

Decode = Callable[..., Results]

_MAX_CTAS = 114
# The sm90 kernel has no pool in FP4.
SM90_CASES = [each for each in CASES if not each.kv_cache_format.endswith("fp4_ca")]


def given(name: str, sm_count: int, **facts: Any) -> Emulated[Dsv4Case]:
    """Return a case on so many SMs."""
    return Emulated(case(name, **facts), sm_count)


_LONG: dict[str, Any] = {"extra_lens": (450, 180), "extra_top_k": 450}
V41: dict[str, Any] = {"kv_cache_format": "fp8_dsv41"}
SPLITS = [
    given("two splits, 64 rows", 2, heads=64, seq_lens=(128, 0), sinks="random", **_LONG),
    given(
        "two splits before another list", 2, heads=64, seq_lens=(1, 128), sinks="random", **_LONG
    ),
    given("many splits, 64 rows", 7, heads=64, seq_lens=(100, 128), **_LONG),
    given("many splits, 32 rows", 6, heads=30, seq_lens=(100, 128), sinks="random", **_LONG),
    given("many splits, 16 rows", 8, heads=7, seq_lens=(1, 128), sinks="random", **_LONG),
    given("CTA groups", 6, heads=128, seq_lens=(128, 5), extra_lens=(60, 200), extra_top_k=256),
    given("CTA groups of four", 8, heads=256, seq_lens=(70,), extra_lens=(60,)),
    given("more lists than CTAs", 3, heads=33, seq_lens=(1, 128, 0, 64, 5), extra_lens=(65,) * 5),
    given("scores of later KV blocks, 64 rows", 1, heads=64, query_magnitude=40.0, **_LONG),
    given("NaN in a split", 7, heads=64, nonfinite="scale", seq_lens=(100, 128), **_LONG),
    given("many splits of V4.1", 7, heads=64, seq_lens=(100, 128), **V41, **_LONG),
    given(
        "shared scales of KV blocks",
        1,
        heads=64,
        sizes="large rope of a few",
        query_magnitude=2.0**-8,
        extra=Pages(page_size=2, count=600),
        **_LONG,
    ),
    given(
        "shared scales of splits", 7, heads=16, sizes="tokens far apart", seq_lens=(9, 9), **_LONG
    ),
]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Decode]:
    """Return what computes a problem by emulated launches of the sm90 kernel."""
    record_launches(monkeypatch)
    beside = words_beside_workspace(_MAX_CTAS)
    # What is right is to the rounding of the kernel that computes it.
    monkeypatch.setattr(Dsv4Problem, "_score_sums", ((64, 4),) * 7)

    def run(problem: Dsv4Problem, sm_count: int = 1, seed: int = 0, **changes: Any) -> Results:
        replace_launches(monkeypatch, mla_plan, sm_count=sm_count, seed=seed)
        monkeypatch.setattr(launchers, "semaphores_of", lambda *_: beside.data_ptr())
        results = computed(_args_of(problem, **changes), "sm90")
        assert not beside[: SEMAPHORE_BYTES // 4].any()
        return results

    with smaller_tiles(monkeypatch, enabled=False):
        yield run


def _args_of(problem: Dsv4Problem, **changes: Any) -> MlaArgs:
    """Return what the entry point makes of its arguments."""
    function = inspect.getclosurevars(trtllm_batch_decode_sparse_mla_dsv4).nonlocals["function"]
    workspace = torch.full((1 << 25,), 0xFF, dtype=torch.uint8)
    changes = {"return_lse": True, "workspace_buffer": workspace} | changes
    args = function(**problem.arguments(**changes))
    assert isinstance(args, MlaArgs)
    return args


# Architectures with and without an instruction for e4m3, with other tiles, and SMs for a split of
# each list and for several.
_GPUS = ((SM_80, 1), (SM_90A, 9), (SM_90A, 1), (SM_80, 6), (SM_90A, 40))
# Of a format of DeepSeek-V4.1 one architecture is compiled: conversions are the same on all.
_ARCH_OF = {
    "fp8_dsv41": SM_80,
    "fp8_dsv41_fp4_ca": SM_90A,
    "fp8_dsv41_inline": SM_90A,
    "fp8_dsv41_inline_fp4_ca": SM_80,
}


@pytest.mark.parametrize(
    ("case", "gpu"),
    [
        (each, (_ARCH_OF.get(each.kv_cache_format, arch), sm_count))
        for each, (arch, sm_count) in zip(CASES, cycle(_GPUS), strict=False)
    ],
    ids=lambda value: value.name if isinstance(value, Dsv4Case) else f"{value[0]}, {value[1]} SMs",
)
def test_every_edge_case_is_right_on_sm80(
    case: Dsv4Case, gpu: tuple[Arch, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the tolerance of float64; every byte that no list names is NaN."""
    arch, sm_count = gpu
    record_launches(monkeypatch, arch=arch)
    replace_launches(monkeypatch, mla_plan, sm_count=sm_count, seed=0)
    problem = case.build("cpu")
    problem.check(*computed(_args_of(problem), "sm80"))


@pytest.mark.parametrize("case", SM90_CASES, ids=lambda case: case.name)
def test_every_edge_case_is_right_on_sm90(case: Dsv4Case, decoded: Decode) -> None:
    """Within the tolerance of float64; every byte that no list names is NaN."""
    problem = case.build("cpu")
    problem.check(*decoded(problem))


@pytest.mark.parametrize("case", SOFTMAX_CASES, ids=lambda case: case.name)
def test_edge_cases_are_right_in_the_largest_tile(case: Dsv4Case, decoded: Decode) -> None:
    """Whose PV warpgroups have the softmax, the V scales and the rope part of V."""
    problem = replace(case, heads=64).build("cpu")
    problem.check(*decoded(problem))


@pytest.mark.parametrize("given", SPLITS, ids=lambda given: given.case.name)
def test_splits_and_cta_groups_are_right(
    given: Emulated[Dsv4Case], decoded: Decode, orders: range
) -> None:
    """Of every tile, in whatever order warps and CTAs come."""
    problem = given.case.build("cpu")
    for seed in orders:
        problem.check(*decoded(problem, given.sm_count, seed))


@pytest.mark.parametrize("heads", [16, 64])
def test_cached_scheduler_metadata_of_lists_of_equal_sum(
    heads: int, decoded: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How a sum of lengths is divided among the pools is read at every call."""
    monkeypatch.setattr(mla_plan, "new_schedule_id", lambda: 7)
    lengths = (((100, 40, 0), (30, 90, 130)), ((30, 100, 128), (100, 30, 2)))
    for seed, (seq_lens, extra_lens) in enumerate(lengths * 2):
        facts: dict[str, Any] = {"seq_lens": seq_lens, "extra_lens": extra_lens}
        problem = case("equal sums", heads=heads, extra_top_k=130, **facts).build("cpu")
        problem.check(*decoded(problem, 3, seed))


@pytest.mark.parametrize(("heads", "block_m"), [(64, 16), (128, 32)])
def test_little_work_takes_tiles_of_few_rows(
    heads: int, block_m: int, decoded: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several M tiles per list, in one CTA group or in several work tiles."""
    made = given("little work", 12, heads=heads, seq_lens=(128, 5), extra_lens=(60, 9))
    problem = made.case.build("cpu")
    taken = record_kernels(monkeypatch)
    with smaller_tiles(monkeypatch, enabled=True):
        problem.check(*decoded(problem, made.sm_count))

    assert [spec.key_fields()["block_m"] for spec in taken] == [str(block_m)]
