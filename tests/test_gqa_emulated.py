"""The grouped-query kernels on the CPU: their own source, with fibers for threads."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.families.common import launchers
from mlagen.families.common.launchers import Launcher
from mlagen.families.dispatch import GQA
from mlagen.families.gqa import launch as gqa_launch
from mlagen.families.gqa import plan as gqa_plan
from mlagen.families.gqa import tensor_maps as gqa_maps
from mlagen.families.gqa.args import GqaArgs
from mlagen.families.gqa.problem import check_problem
from mlagen.settings import current_settings
from mlagen.spec.arch import Arch
from mlagen.spec.gqa import sm90
from tests.emulator.emulated import COMPILER, Emulated, encode, replace_launches
from tests.families.launches import record_launches
from tests.kernels import SM_80, SM_90A
from tests.problems.batch_decode import decode_planned
from tests.problems.entry_points import decode_gqa_with_lse, not_written, trtllm_gqa_with_lse
from tests.problems.extremes import extreme_sinks
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.problem import E4M3
from tests.sm90_tiles import max_kv_heads_per_cta

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

_MAX_BLOCKS = 114


FP16 = torch.float16
E4M3_32_ROWS: dict[str, Any] = {"kv": "e4m3", "group": 8, "q_len": 4}
DIMS_192_128: dict[str, Any] = {"head_dim": 192, "head_dim_vo": 128}
# Scores near the cap and beyond; and far from it.
CAPPED: dict[str, Any] = {"soft_cap": 30.0, "score_scale": 2.0}
FAR_FROM_CAP: dict[str, Any] = {"soft_cap": 1000.0, "score_scale": 0.2}
TOKEN_SCALES: dict[str, Any] = {"has_token_scales": True}
SMALL_SCALES: dict[str, Any] = TOKEN_SCALES | {"cache_layout": "strided", "scale_exponent": -30}
# In the pages of vLLM: keys, their scales, values, their scales.
INLINE_SCALES: dict[str, Any] = TOKEN_SCALES | {"cache_layout": "inline", "scale_exponent": -30}
E4M3_OUT: dict[str, Any] = {"kv": "e4m3", "out_dtype": E4M3, "output_scale": 0.5}
MANY = tuple(i * 37 % 300 for i in range(36))
EIGHT = (300, 0, 17, 129, 256, 1, 700, 90)


def given(
    name: str, sm_count: int = 1, *, has_cvt_e4m3: bool = False, **facts: Any
) -> Emulated[GqaCase]:
    """Return a case on so many SMs."""
    return Emulated(GqaCase(name=name, **facts), sm_count, has_cvt_e4m3)


CASES = [
    given("ragged lengths", 6, seq_lens=(300, 17, 0, 128), page_size=64),
    given("a ring that comes round", 1, seq_lens=(2000, 1100), kv_heads=1),
    given("fp16, small pages", 3, seq_lens=(300, 17), dtype=FP16, group=8, o_scale=0.5),
    given("e4m3", 6, seq_lens=(300, 0, 700), kv="e4m3", group=8, page_size=64),
    given("e4m3 under fp16", 5, seq_lens=(300, 17), kv="e4m3", dtype=FP16, head_dim=64),
    given(
        "e4m3 in and out",
        3,
        seq_lens=(300, 17),
        head_dim=256,
        o_scale=0.25,
        page_size=32,
        **E4M3_OUT,
    ),
    given("e5m2", 5, seq_lens=(300, 0, 700), kv="e5m2", group=8, q_len=2, page_size=64, window=99),
    given("int8", 6, seq_lens=(300, 0, 700), kv="int8", group=8, output_scale=0.02, page_size=64),
    given(
        "int8 under fp16",
        3,
        seq_lens=(300, 17),
        kv="int8",
        dtype=FP16,
        head_dim=64,
        mask="random",
        q_len=5,
        output_scale=0.02,
    ),
    given("nvfp4", 6, seq_lens=(300, 0, 700), kv="nvfp4", group=8, page_size=64),
    given(
        "nvfp4, 64 dims", 3, seq_lens=(300, 17), kv="nvfp4", dtype=FP16, head_dim=64, layout="HND"
    ),
    given(
        "nvfp4, 256 dims",
        3,
        seq_lens=(300, 17),
        kv="nvfp4",
        head_dim=256,
        q_len=4,
        window=99,
        sink=2.0,
    ),
    given(
        "nvfp4, 32 rows", 2, seq_lens=EIGHT, kv="nvfp4", mask="random", window=50, group=8, q_len=4
    ),
    given("token scales", 6, seq_lens=(300, 0, 700), kv="int8", group=8, **TOKEN_SCALES),
    given(
        "small token scales",
        5,
        seq_lens=(300, 17),
        kv="int8",
        page_size=64,
        window=99,
        q_len=2,
        layout="HND",
        **SMALL_SCALES,
    ),
    given(
        "token scales, 32 rows",
        2,
        seq_lens=EIGHT,
        mask="random",
        window=50,
        **E4M3_32_ROWS | SMALL_SCALES,
    ),
    given(
        "token scales of all magnitudes",
        2,
        seq_lens=(700, 90),
        kv="int8",
        q_len=3,
        scale_spread=40,
        **TOKEN_SCALES,
    ),
    given("token scales, 256 dims", 3, seq_lens=(300, 17), kv="e5m2", head_dim=256, **TOKEN_SCALES),
    given("token scales, 512 dims", 3, seq_lens=(200, 90), kv="e4m3", head_dim=512, **SMALL_SCALES),
    given(
        "token scales, values of fewer dims",
        3,
        seq_lens=(300, 17),
        kv="int8",
        group=16,
        **TOKEN_SCALES | DIMS_192_128,
    ),
    given("scales in rows", 6, seq_lens=(700, 0, 300), kv="int8", group=8, **INLINE_SCALES),
    given(
        "scales in rows, 32 rows",
        2,
        seq_lens=EIGHT,
        mask="random",
        window=50,
        page_size=256,
        layout="HND",
        **E4M3_32_ROWS | INLINE_SCALES,
    ),
    given(
        "scales in rows of 512 dims",
        3,
        seq_lens=(200, 90),
        kv="e4m3",
        head_dim=512,
        kv_heads=1,
        page_size=64,
        **INLINE_SCALES,
    ),
    given(
        "scales in rows, values of fewer dims",
        3,
        seq_lens=(300, 17),
        kv="int8",
        group=16,
        kv_heads=3,
        head_dim=192,
        head_dim_vo=96,
        **INLINE_SCALES,
    ),
    given("16 rows, one SM", 1, seq_lens=(300, 0, 5), head_dim=64, group=16),
    given("32 rows, sinks", 5, seq_lens=(300, 3), group=8, q_len=4, page_size=64, sink=2.0),
    given("32 rows in e4m3", 2, seq_lens=EIGHT, page_size=64, **E4M3_32_ROWS),
    given(
        "32 rows in e4m3, a mask and a window",
        1,
        seq_lens=(300, 17, 129, 90),
        mask="random",
        window=50,
        page_size=64,
        **E4M3_32_ROWS,
    ),
    given("a window", 5, seq_lens=(900, 130, 3), group=7, q_len=4, head_dim=64, window=200),
    given("ragged queries", 7, seq_lens=(300, 130, 0, 77), q_lens=(17, 0, 2, 5), page_size=256),
    given("a draft mask", 9, seq_lens=(300, 200), q_len=5, mask="random", group=3, window=100),
    given("many splits", 24, seq_lens=(3072,), kv_heads=1, group=8, sink=3.0),
    given("78 SMs", 78, seq_lens=(2000, 400, 17, 900), q_lens=(1, 2, 1, 0)),
    given(
        "114 SMs",
        114,
        seq_lens=(2300, 0, 900),
        q_lens=(1, 1, 2),
        kv="e4m3",
        kv_heads=3,
        page_size=64,
    ),
    given("many sequences", 7, seq_lens=MANY, kv_heads=1, group=2),
    given("not causal", 5, seq_lens=(300, 3, 0), q_len=9, causal=False, sink=2.0, page_size=64),
    given("512 dims", 5, seq_lens=(300, 3, 130), group=8, page_size=64, head_dim=512, sink=2.0),
    given(
        "512 dims in e4m3, 16 rows, a mask and a window",
        3,
        seq_lens=(200, 90),
        kv="e4m3",
        kv_heads=1,
        q_len=4,
        head_dim=512,
        mask="random",
        window=50,
    ),
    given("values of fewer dims", 5, seq_lens=(300, 3, 130), group=16, sink=2.0, **DIMS_192_128),
    given(
        "values of fewer dims in e4m3, 32 rows, a window",
        3,
        seq_lens=(300, 17),
        kv="e4m3",
        group=8,
        q_len=4,
        window=100,
        page_size=64,
        **DIMS_192_128,
    ),
    given("80 dims", 5, seq_lens=(300, 3), group=8, head_dim=80, page_size=64),
    given("large scores", 4, seq_lens=(900,), query_magnitude=100.0, layout="HND"),
    given("a soft cap", 5, seq_lens=(300, 17, 900), sink=3.0, **CAPPED),
    given("a soft cap in e4m3", 2, seq_lens=EIGHT, page_size=64, **FAR_FROM_CAP | E4M3_32_ROWS),
    given(
        "a soft cap, ragged queries",
        7,
        seq_lens=(300, 130, 0, 77),
        q_lens=(17, 0, 2, 5),
        window=100,
        **CAPPED,
    ),
]

TOGETHER = [
    given(
        "four heads of nvfp4",
        5,
        seq_lens=(300, 0, 700),
        kv="nvfp4",
        kv_heads=4,
        window=130,
        page_size=32,
    ),
    given(
        "two heads of nvfp4",
        5,
        seq_lens=(300, 90),
        kv="nvfp4",
        head_dim=256,
        cache_layout="strided",
        o_scale=0.5,
    ),
    given(
        "four heads with token scales",
        5,
        seq_lens=(300, 90),
        kv="e4m3",
        kv_heads=4,
        head_dim=64,
        **SMALL_SCALES,
    ),
    given(
        "two heads with token scales",
        5,
        seq_lens=(700, 300, 90),
        kv="int8",
        kv_heads=4,
        group=8,
        page_size=64,
        layout="HND",
        **TOKEN_SCALES,
    ),
    given("96 dims of two heads", 5, seq_lens=(300, 3), kv="e4m3", head_dim=96, page_size=64),
    given("two heads", 6, seq_lens=(300, 0, 700), kv="e4m3", page_size=64),
    given("many splits of two heads", 24, seq_lens=(1536, 450), kv="e4m3", sink=3.0, page_size=64),
    given(
        "four heads",
        5,
        seq_lens=(300, 0, 700),
        kv="e4m3",
        kv_heads=8,
        head_dim=64,
        q_len=2,
        mask="random",
        layout="HND",
    ),
    given(
        "16 bits, ragged queries",
        7,
        seq_lens=(300, 130, 0, 77),
        q_lens=(2, 0, 1, 3),
        head_dim=64,
        group=2,
        page_size=16,
        window=100,
    ),
]

# Of the entry point with TensorRT-LLM's signature.
RANK: dict[str, Any] = {"cp_world": 3, "cp_rank": 1}
SERVER_CASES = [
    given(
        "a rank of DCP",
        6,
        seq_lens=(300, 17, 0, 128),
        q_len=4,
        committed=(896, 52, 5, 300),
        page_size=64,
        sink=2.0,
        **RANK,
    ),
    given(
        "a rank of DCP, ragged queries in e4m3",
        5,
        seq_lens=(300, 130, 0, 77),
        q_lens=(17, 0, 2, 5),
        committed=(890, 300, 0, 2**31 - 1),
        kv="e4m3",
        **RANK,
    ),
    given(
        "a rank of DCP, 32 rows",
        2,
        seq_lens=(300, 0, 90),
        group=8,
        q_len=4,
        committed=(890, 3, 100),
        page_size=64,
        **RANK,
    ),
    given(
        "a rank of DCP in nvfp4",
        4,
        seq_lens=(300, 0, 90),
        q_len=4,
        committed=(890, 3, 260),
        kv="nvfp4",
        page_size=64,
        **RANK,
    ),
    given("page ids of values", 5, seq_lens=(300, 0, 700), has_value_tables=True, q_len=2),
    given("page ids of values in nvfp4", 3, seq_lens=(300, 17), has_value_tables=True, kv="nvfp4"),
    given(
        "page ids of values, scales in rows",
        3,
        seq_lens=(300, 17),
        kv="e5m2",
        q_len=2,
        head_dim=64,
        window=99,
        layout="HND",
        has_value_tables=True,
        **INLINE_SCALES,
    ),
    given(
        "page ids of values in e4m3",
        3,
        seq_lens=EIGHT,
        has_value_tables=True,
        page_size=64,
        mask="random",
        **E4M3_32_ROWS,
    ),
]

# Lengths around multiples of the fixed splits, which tests make short.
SPLIT_TOKENS = 256
_AROUND: dict[str, Any] = {"seq_lens": (511, 0, 773, 256, 257, 1600, 17)}
_DRAFTS: dict[str, Any] = {"q_len": 4, "mask": "random", "window": 300}
INVARIANT_CASES = [
    given("16 bits", 5, sink=2.0, **_AROUND),
    given(
        "more tokens than the most splits are for",
        3,
        seq_lens=(2700, 40, 1900),
        kv_heads=1,
        group=2,
    ),
    given(
        "a rank of DCP", 3, seq_lens=(600, 0), q_len=4, committed=(1796, 5), page_size=64, **RANK
    ),
    given("a window over one split more", 7, seq_lens=(2300, 40), kv_heads=1, group=2, window=2048),
    given("e4m3, drafts and a window", 6, kv="e4m3", page_size=64, **_AROUND, **_DRAFTS),
    given("four heads of nvfp4", 3, seq_lens=(600, 0, 257), kv="nvfp4", kv_heads=4, page_size=32),
    given("32 rows", 4, seq_lens=(600, 257, 30), group=8, q_len=4, page_size=64, **CAPPED),
    given("scales in rows", 3, seq_lens=(600, 0, 257), kv="int8", kv_heads=3, **INLINE_SCALES),
    given("512 dims", 3, seq_lens=(600, 0, 257), kv_heads=1, head_dim=512, page_size=64),
    given(
        "ragged queries, a window",
        6,
        seq_lens=(600, 900, 0, 257),
        q_lens=(17, 1, 0, 4),
        group=2,
        head_dim=64,
        window=520,
    ),
]

_MASKED: dict[str, Any] = {"mask": "random", "window": 40}
_RAGGED: dict[str, Any] = {"seq_lens": (70, 50, 0, 33), "q_lens": (5, 0, 2, 3)}
SM80_CASES = [
    given("ragged lengths", seq_lens=(100, 17, 0), kv_heads=1, page_size=24),
    given("splits", 16, seq_lens=(300, 40, 0), kv_heads=1, group=2, sink=2.0),
    given("ragged queries", group=4, head_dim=64, dtype=FP16, layout="HND", **_RAGGED),
    given(
        "a draft mask and a window",
        seq_lens=(130, 60),
        kv_heads=1,
        q_len=5,
        head_dim=64,
        **_MASKED,
    ),
    given("not causal", 9, seq_lens=(300, 3), q_len=9, head_dim=64, causal=False, sink=2.0),
    given("e4m3 in software", seq_lens=(100,), kv="e4m3", kv_heads=1, head_dim=64),
    given("e4m3 in and out", seq_lens=(100,), head_dim=64, **E4M3_OUT),
    given("e5m2", seq_lens=(100,), kv="e5m2", head_dim=64),
    given("int8", seq_lens=(100,), kv="int8", output_scale=0.02, head_dim=64),
    given("token scales", 3, seq_lens=(100, 17, 0), kv="int8", head_dim=64, **TOKEN_SCALES),
    given(
        "token scales of all magnitudes",
        2,
        seq_lens=(100, 30),
        kv="int8",
        dtype=FP16,
        scale_exponent=-30,
        scale_spread=40,
        **TOKEN_SCALES,
    ),
    given(
        "token scales in a row", 2, seq_lens=(70,), kv="e4m3", dtype=FP16, q_len=3, **INLINE_SCALES
    ),
    given("a soft cap", 3, seq_lens=(100, 17, 0), mask="random", q_len=3, sink=3.0, **CAPPED),
    given("stacked", seq_lens=(70, 3), cache_layout="stacked", layout="HND", head_dim=64),
    given("values of fewer dims", seq_lens=(70, 40), **DIMS_192_128),
    given("nvfp4 values of fewer dims", 3, seq_lens=(70,), kv="nvfp4", head_dim=64, head_dim_vo=48),
    given("nvfp4 of 80 and 64 dims", kv="nvfp4", seq_lens=(70,), head_dim=80, head_dim_vo=64),
    given("nvfp4 stacked", seq_lens=(70,), kv="nvfp4", cache_layout="stacked", head_dim=64),
    given("nvfp4", 1, has_cvt_e4m3=True, seq_lens=(100, 30), kv="nvfp4", o_scale=0.5, head_dim=64),
]

SM80_SERVER_CASES = [
    given(
        "a rank of DCP",
        8,
        seq_lens=(300, 17, 0),
        q_len=4,
        committed=(896, 52, 5),
        kv_heads=1,
        head_dim=64,
        **RANK,
    ),
    given(
        "a rank of DCP, ragged queries",
        seq_lens=(70, 50, 0, 33),
        q_lens=(5, 0, 2, 3),
        committed=(205, 0, 9, 2**31 - 1),
        head_dim=64,
        **RANK,
    ),
    given("page ids of values", 8, seq_lens=(100, 0, 300), has_value_tables=True, head_dim=64),
    given(
        "page ids of values in nvfp4",
        seq_lens=(100,),
        has_value_tables=True,
        kv="nvfp4",
        head_dim=64,
    ),
]

Decode = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decode:
    """Return what computes a problem by emulated launches, of the sm80 kernel for its ``arch``."""
    counters = (ctypes.c_uint32 * (2 * _MAX_BLOCKS))()

    def run(
        problem: GqaProblem,
        sm_count: int,
        seed: int,
        decode: Decode = decode_gqa_with_lse,
        sm80_on: Arch | None = None,
        batch_invariant: bool = False,
        **changes: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        record_launches(monkeypatch, arch=sm80_on or SM_90A)

        def run(inputs: GqaArgs, *_: object) -> tuple[torch.Tensor, ...]:
            inputs = inputs._replace(batch_invariant=batch_invariant)
            request = check_problem(inputs)
            on_gpu = replace(request, device=torch.device("cuda", 0))
            if sm80_on is None:
                call: Launcher = gqa_launch.make_sm90_launcher(inputs, on_gpu, current_settings())
            else:
                call = GQA.family.sm80_launcher(inputs, on_gpu)
            return GQA.launch(replace(call, problem=request), inputs)

        replace_launches(monkeypatch, gqa_plan, sm_count=sm_count, seed=seed)
        monkeypatch.setattr(gqa_maps, "encode", encode)
        monkeypatch.setattr(launchers, "semaphores_of", lambda *_: ctypes.addressof(counters))
        monkeypatch.setattr(GQA, "run", run)
        workspace = torch.full((1 << 22,), 0xFF, dtype=torch.uint8)
        result = decode(problem, **not_written(problem, workspace) | changes)

        assert not any(counters)
        return result

    return run


@pytest.mark.parametrize("given", CASES, ids=lambda given: given.case.name)
def test_a_kernel_is_right_in_whatever_order_warps_and_copies_come(
    given: Emulated[GqaCase], decoded: Decode, orders: range
) -> None:
    """Within the tolerance of float64; counters are zero again, and nothing is left under way."""
    problem = given.case.build("cpu")
    for seed in orders:
        problem.check(*decoded(problem, given.sm_count, seed))


@pytest.mark.parametrize("given", TOGETHER, ids=lambda given: given.case.name)
def test_a_block_of_several_heads_is_right_too(
    given: Emulated[GqaCase], decoded: Decode, orders: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are kernels for, though there is too little work for them."""
    problem = given.case.build("cpu")
    with max_kv_heads_per_cta(monkeypatch):
        for seed in orders:
            problem.check(*decoded(problem, given.sm_count, seed))


@pytest.fixture
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fixed splits short, and few before they double."""
    monkeypatch.setattr(sm90, "_SPLIT_TOKENS", SPLIT_TOKENS)
    monkeypatch.setattr(sm90, "_MAX_SPLITS", (8,))


def bits_of_sequences(
    problem: GqaProblem, result: tuple[torch.Tensor, torch.Tensor]
) -> list[tuple[list[int], list[int]]]:
    """Return the bits of output and LSE of each sequence."""
    sizes = list(problem.case.lens)
    parts = [
        [part.flatten(1).view(torch.uint8) for part in torch.split(whole.flatten(0, -3), sizes)]
        for whole in (result[0], result[1].unsqueeze(-1))
    ]
    return [(out.tolist(), lse.tolist()) for out, lse in zip(*parts, strict=True)]


@pytest.mark.usefixtures("short_splits")
@pytest.mark.parametrize("given", INVARIANT_CASES, ids=lambda given: given.case.name)
def test_bits_do_not_depend_on_the_batch(given: Emulated[GqaCase], decoded: Decode) -> None:
    """Batch-invariant results are right, and those of a sequence alone and in another batch."""
    problem = given.case.build("cpu")
    mode: dict[str, Any] = {"batch_invariant": True}
    mode["decode"] = trtllm_gqa_with_lse if given.case.cp_world else decode_gqa_with_lse
    result = decoded(problem, given.sm_count, 0, **mode)
    problem.check(*result)
    bits = bits_of_sequences(problem, result)
    count = len(bits)
    split = [seq for seq, length in enumerate(problem.case.seq_lens) if length > SPLIT_TOKENS]
    batches = [[seq] for seq in split] + [[*reversed(range(count)), 0, 0]]
    for seed, batch in enumerate(batches):
        other = problem.picked(batch)
        result = decoded(other, 1 + seed * 5 % 17, seed, **mode)
        assert bits_of_sequences(other, result) == [bits[seq] for seq in batch], batch


def test_bits_of_other_kernels_depend_on_the_batch(decoded: Decode) -> None:
    """Otherwise the test of batch-invariant kernels proves nothing."""
    problem = GqaCase(seq_lens=(1600, 300)).build("cpu")
    bits = bits_of_sequences(problem, decoded(problem, 5, 0))
    alone = problem.picked([0])
    assert bits_of_sequences(alone, decoded(alone, 3, 0)) != bits[:1]


@pytest.mark.parametrize("sm80_on", [None, SM_80], ids=["sm90", "sm80"])
def test_what_servers_pass_is_right_too(
    sm80_on: Arch | None, decoded: Decode, orders: range
) -> None:
    """Ranks of decode context parallel, and block tables of values."""
    for given in SERVER_CASES if sm80_on is None else SM80_SERVER_CASES:
        problem = given.case.build("cpu")
        for seed in orders:
            result = decoded(
                problem, given.sm_count, seed, decode=trtllm_gqa_with_lse, sm80_on=sm80_on
            )
            problem.check(*result, what=f"{given.case.name}: ")


@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
@pytest.mark.parametrize("sm_count", [1, 6])
def test_sinks_may_be_any_number(sm_count: int, kv: str, decoded: Decode) -> None:
    """In whole work tiles and in splits: also infinite ones, and NaN."""
    case = GqaCase(seq_lens=(900, 0), group=8, page_size=64, kv=kv)
    problem = replace(case.build("cpu"), sinks=extreme_sinks("cpu"))

    problem.check(*decoded(problem, sm_count, 0))


@pytest.mark.parametrize("sm_count", [1, 6], ids=["whole", "split"])
def test_an_lse_may_be_natural(sm_count: int, decoded: Decode) -> None:
    """The LSE of whole work tiles and of splits is in the base of the call, sinks included."""
    problem = GqaCase(seq_lens=(900, 0), head_dim=64, sink=3.0).build("cpu")

    problem.check(*decoded(problem, sm_count, 0, return_lse_base="basee"), natural=True)


def test_page_ids_of_a_plan_are_flat(decoded: Decode) -> None:
    """Each request reads its own page ids, from where they start."""
    problem = GqaCase(seq_lens=(300, 0, 129), q_len=2, head_dim=64, sink=2.0).build("cpu")

    problem.check(*decoded(problem, 5, 0, decode=decode_planned))


def test_nothing_before_the_offsets_of_a_plan_is_read(
    decoded: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CTA without another work item reads the page ids of none; a read there would crash."""
    problem = GqaCase(seq_lens=(300, 0, 129), head_dim=64).build("cpu")
    launcher = gqa_launch.make_sm90_launcher

    def with_guard(inputs: GqaArgs, *others: Any, **options: Any) -> Any:
        assert inputs.kv_indptr is not None
        inputs.kv_indptr.data = after_a_guard_page(inputs.kv_indptr)
        return launcher(inputs, *others, **options)

    monkeypatch.setattr(gqa_launch, "make_sm90_launcher", with_guard)
    problem.check(*decoded(problem, 5, 0, decode=decode_planned))


def after_a_guard_page(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of an int32 tensor behind memory that may not be read."""
    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), size, 0) == 0
    copy = torch.frombuffer(memory, dtype=torch.int32, count=tensor.numel(), offset=size)
    return copy.copy_(tensor)


@pytest.mark.parametrize("sm_count", [1, 6], ids=["whole", "split"])
def test_pages_may_overlap(sm_count: int, decoded: Decode) -> None:
    """A page begins at any token of a contiguous cache, and hides the tokens behind its own."""
    problem = GqaCase(seq_lens=(300, 64, 17), kv_heads=1, group=8, page_size=64).build("cpu")
    tables = problem.block_tables.long()
    caches, rows = [], torch.tensor([3, 320, 400], dtype=torch.int32)
    for pages in (problem.store.key, problem.store.value):
        flat = torch.full((500, pages.shape[-1]), math.nan, dtype=pages.dtype)
        for row, table, seq_len in zip(rows, tables, problem.case.seq_lens, strict=True):
            used = pages[table[: -(-seq_len // 64)]]
            flat[row : row + seq_len] = used.flatten(0, 2)[:seq_len]
        caches.append(flat.unfold(0, 64, 1).mT.unsqueeze(2))
    page = torch.arange(tables.shape[1], dtype=torch.int32) * 64

    changes = {"kv_cache": tuple(caches), "block_tables": rows[:, None] + page}
    problem.check(*decoded(problem, sm_count, 0, **changes))


def test_where_offsets_go_back_nothing_is_written(decoded: Decode) -> None:
    """There could be more work than positions on the line; and a later call is right."""
    case = GqaCase(seq_lens=(300, 17, 64), q_lens=(2, 1, 2), group=4, page_size=64)
    problem = case.build("cpu")
    out = torch.full_like(problem.query, 7.0)
    ends = torch.tensor([0, 5, 0, 5], dtype=torch.int32)
    decoded(problem, 6, 0, out=out, q_cu_seq_lens=ends)
    assert torch.equal(out, torch.full_like(out, 7.0))
    problem.check(*decoded(problem, 6, 0))


@pytest.mark.parametrize(
    ("kv", "head_dim", "page_size", "value"),
    [
        *(("16-bit", 64, 16, math.nan), ("e4m3", 128, 64, math.nan), ("e5m2", 64, 64, math.inf)),
        *(
            ("nvfp4", 128, 64, math.nan),
            ("16-bit", 512, 64, math.nan),
            ("16-bit", 80, 64, math.nan),
        ),
        *(("int8 with scales", 64, 64, math.nan), ("int8 with scales", 64, 64, math.inf)),
        ("e4m3 with scales in rows", 64, 64, math.nan),
    ],
    ids=[
        "16-bit",
        "e4m3",
        "e5m2",
        "nvfp4",
        "512 dims",
        "80 dims",
        "scale NaN",
        "scale Inf",
        "in rows",
    ],
)
def test_a_hidden_token_with_nan_reaches_no_row_that_may_not_see_it(
    kv: str, head_dim: int, page_size: int, value: float, decoded: Decode
) -> None:
    """NaN or Inf in V of the newest token is seen by the last query token and by no other."""
    kv, _, scales = kv.partition(" with ")
    facts: dict[str, Any] = {"head_dim": head_dim, "page_size": page_size, "kv": kv}
    facts |= {"cache_layout": "inline" if "rows" in scales else "tuple"}
    case = GqaCase(seq_lens=(100,), q_len=4, group=2, has_token_scales=bool(scales), **facts)
    for sm80_on in (None, SM_80) if scales else (None,):
        problem = case.build("cpu")
        expected, _ = decoded(problem, 1, 0, sm80_on=sm80_on)
        page = int(problem.block_tables[0, 99 // case.page_size])
        value_of = problem.store.value
        if (scale := problem.store.value_scale) is not None:
            value_of = scale if scales else scale.view(E4M3)
        value_of[page, 99 % case.page_size] = value
        out, _ = decoded(problem, 1, 1, sm80_on=sm80_on)
        assert not out[0, 3].isfinite().any()
        assert torch.equal(out[0, :3], expected[0, :3])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_nvfp4_may_lie_at_any_byte(layout: str, decoded: Decode) -> None:
    """Rows of scales that are not aligned to their size are copied byte by byte."""
    case = GqaCase(seq_lens=(300, 0, 90), kv="nvfp4", page_size=64, window=200, layout=layout)
    problem = case.build("cpu")
    scales: Any = problem.store.scales("tuple", layout)
    wide = [
        torch.full((*each.shape[:-1], each.shape[-1] + 3), 0x7F, dtype=torch.uint8)
        for each in scales
    ]
    moved = tuple(whole[..., 1:-2].copy_(each) for whole, each in zip(wide, scales, strict=True))

    problem.check(*decoded(problem, 5, 0, kv_cache_sf=moved))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_scales_of_nvfp4_may_lie_in_the_pages(head_dim: int, decoded: Decode) -> None:
    """In the pages of vLLM: keys, their scales, values, their scales."""
    case = GqaCase(seq_lens=(300, 0, 90), kv="nvfp4", page_size=32, head_dim=head_dim)
    problem = case.build("cpu")
    store = problem.store
    parts = [store.key, store.key_scale, store.value, store.value_scale]
    pages = torch.cat([part.flatten(1) for part in parts if part is not None], dim=1)
    widths = [part[0].numel() for part in parts if part is not None]
    views = [
        view.view(part.shape)
        for view, part in zip(torch.split(pages, widths, dim=1), parts, strict=True)
        if part is not None
    ]

    changes = {"kv_cache": (views[0], views[2]), "kv_cache_sf": (views[1], views[3])}
    problem.check(*decoded(problem, 5, 0, **changes))


@pytest.mark.parametrize("given", SM80_CASES, ids=lambda given: given.case.name)
def test_an_sm80_kernel_is_right_in_whatever_order_warps_come(
    given: Emulated[GqaCase], decoded: Decode, orders: range
) -> None:
    """Within the tolerance of float64, and no copy is read before its thread has waited for it."""
    problem = given.case.build("cpu")
    for seed in orders:
        arch = SM_90A if given.has_cvt_e4m3 else SM_80
        problem.check(*decoded(problem, given.sm_count, seed, sm80_on=arch))


@pytest.mark.parametrize("sm_count", [1, 16], ids=["whole", "split"])
def test_an_lse_of_sm80_may_be_natural(sm_count: int, decoded: Decode) -> None:
    """The LSE of whole sequences and of splits is in the base of the call, sinks included."""
    case = GqaCase(seq_lens=(300, 0), kv_heads=1, group=8, head_dim=64, sink=3.0)
    problem = case.build("cpu")

    result = decoded(problem, sm_count, 0, sm80_on=SM_80, return_lse_base="basee")
    problem.check(*result, natural=True)


@pytest.mark.parametrize("sm_count", [16, 40])
@pytest.mark.parametrize(
    "facts",
    [
        {"seq_lens": (260,), "q_len": 8, "group": 8, "head_dim": 512},
        {"seq_lens": (259, 65), "q_len": 3, "head_dim": 512},
        {"seq_lens": (520, 130), "q_len": 8, "group": 16, "head_dim": 64},
    ],
    ids=lambda facts: str(facts["seq_lens"]),
)
def test_a_causal_mask_gives_the_bits_of_causal_order(
    facts: dict[str, Any], sm_count: int, decoded: Decode
) -> None:
    """The sm80 kernel adds up the same tokens in the same order, with and without a mask."""
    problem = GqaCase(**facts, kv_heads=1, mask="causal").build("cpu")

    masked = decoded(problem, sm_count, 0, sm80_on=SM_80)

    assert all(map(torch.equal, masked, decoded(problem, sm_count, 0, sm80_on=SM_80, mask=None)))


@pytest.mark.parametrize("kv", ["16-bit", "nvfp4"])
def test_page_ids_of_a_plan_are_flat_for_sm80(kv: str, decoded: Decode) -> None:
    """Each request reads its own page ids, for its rows and for their scales."""
    case = GqaCase(seq_lens=(100, 0, 40), kv=kv, head_dim=64, kv_heads=1)

    problem = case.build("cpu")

    problem.check(*decoded(problem, 8, 0, decode=decode_planned, sm80_on=SM_80))
