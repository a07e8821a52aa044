"""The sm90 MLA kernels: right, and bitwise equal in any order of warps and CTAs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mlagen
from mlagen import engine
from mlagen.families.mla import dispatch as mla_call
from mlagen.families.mla import plan_sm90 as plan_mla_sm90
from mlagen.runtime import device
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.mla.sm80 import MlaSm80Spec
from mlagen.spec.mla.sm90 import MlaSm90Spec
from mlagen.spec.mla.sm90_calls import mla_sm90_kernel
from mlagen.spec.mla.sm90_fp8 import MlaSm90Fp8Spec
from mlagen.spec.mla.variant import MlaVariant
from tests.cases import MlaCase, MlaProblem
from tests.graph_replay import captured
from tests.launch_repeats import delayed_launches, mismatches, nonzero_semaphore_bytes, with_delays
from tests.mla_cases import KINDS, case_of_kind
from tests.mla_semantics import compute, decode
from tests.sm90_tiles import sm90_kernels, smaller_tiles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs an sm_90 GPU",
)

E4M3 = torch.float8_e4m3fn
FAMILIES = {
    torch.bfloat16: MlaSm90Spec,
    torch.float16: MlaSm90Spec,
    E4M3: MlaSm90Fp8Spec,
}

# For every tile: one sequence in many splits, some in a few, and many sequences.
TILES = {"16 rows": (16, 1), "32 rows": (16, 2), "64 rows": (64, 1), "CTA groups of 2": (128, 1)}
LENGTHS = {
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
CASES = [
    MlaCase(name=f"{tile}, {name}", seq_lens=lens, heads=heads, q_len=q_len, with_sinks=True)
    for tile, (heads, q_len) in TILES.items()
    for name, lens in LENGTHS.items()
]


@pytest.fixture(autouse=True)
def _sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every call of this file use an sm90 kernel with its default tile."""
    with sm90_kernels(monkeypatch):
        yield


@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("dtype", FAMILIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_kernels_are_right(
    case: MlaCase, dtype: torch.dtype, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel is within the tolerance of float64."""
    problem = replace(case, dtype=dtype, page_size=page_size).build("cuda")
    mla_call._calls.clear()
    for kernel in ("sm90", "sm80"):
        monkeypatch.setenv("MLAGEN_MLA_KERNEL", kernel)
        current_settings.cache_clear()

        problem.check(*compute(problem))

    kernels = [type(call.decode.spec) for call in mla_call._calls.values()]
    assert kernels == [FAMILIES[dtype], MlaSm80Spec]


@pytest.mark.parametrize("dtype", FAMILIES, ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_more_sequences_than_threads(heads: int, dtype: torch.dtype) -> None:
    """Threads of the scheduler handle several sequences each, some empty or without a query."""
    seqs = range(1100)
    lens = tuple(37 * i % 251 for i in seqs)
    case = MlaCase(name="", seq_lens=lens, heads=heads, dtype=dtype, with_sinks=True)
    ragged = replace(case, q_lens=tuple((i % 7 > 0) + (i % 5 == 0) for i in seqs))
    for each in (case, ragged):
        problem = each.build("cuda")

        problem.check(*compute(problem))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_an_empty_block_table(heads: int, dtype: torch.dtype) -> None:
    """A block table without columns is not read; every row is zero."""
    problem = MlaCase(name="", seq_lens=(0, 0, 0), heads=heads, dtype=dtype).build("cuda")
    tables = problem.arguments()["block_tables"]

    assert not decode(problem, block_tables=tables[:, :0].contiguous()).any()


def repeat(problem: MlaProblem, repeats: int) -> int:
    """Return the number of repetitions that differ from the first in any bit."""
    out = torch.empty_like(decode(problem))
    arguments = problem.arguments(out=out)

    def compute_again() -> torch.Tensor:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
        return out

    return mismatches(compute_again, repeats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_ten_thousand_launches_give_the_same_bits(case: MlaCase, dtype: torch.dtype) -> None:
    """No race between CTAs or warps changes a result."""
    problem = replace(case, dtype=dtype).build("cuda")

    assert repeat(problem, 10_000) == 0


# Places where warps wait, and the max sleep before each, in nanoseconds.
DELAYS = {
    "  mbarrier_wait(shared_address(&barrier), phase);\n": 2000,
    "  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);\n": 5000,
    "  reduce_group.sync();\n": 5000,
}


@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_delays_change_no_bit(case: MlaCase, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not depend on the order of warps and CTAs."""
    problem = replace(case, dtype=E4M3 if dtype is DType.E4M3 else case.dtype).build("cuda")
    expected = decode(problem).clone()
    variant = MlaVariant(query_dtype=dtype, kv_dtype=dtype)
    spec = mla_sm90_kernel(device.arch_of_device(0), variant, case.heads * case.q_len, "auto")
    assert spec is not None
    assert (spec, 0) in engine._loaded
    slow = with_delays(spec, DELAYS)
    monkeypatch.setitem(engine._loaded, (spec, 0), slow)
    mla_call._calls.clear()

    differing = repeat(problem, delayed_launches(CASES))
    result = decode(problem)

    mla_call._calls.clear()
    assert differing == 0
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("case", CASES[1::3], ids=str)
def test_a_thousand_replays_keep_the_semaphores_at_zero(case: MlaCase, dtype: torch.dtype) -> None:
    """A replay needs no memset, since every launch resets its semaphores."""
    problem = replace(case, dtype=dtype).build("cuda")
    expected = decode(problem).clone()
    arguments = problem.arguments(out=torch.empty_like(expected))
    graph = captured(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla, arguments)

    for _ in range(1000):
        graph.replay()

    torch.cuda.synchronize()
    assert torch.equal(arguments["out"], expected)
    assert nonzero_semaphore_bytes() == 0


@pytest.mark.parametrize("dtype", FAMILIES, ids=str)
def test_a_small_call_uses_the_sm80_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default settings select the sm80 kernel."""
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "auto")
    monkeypatch.setattr(plan_mla_sm90, "USES_SM80_FOR_SMALL_CALLS", True)
    current_settings.cache_clear()
    assert device.device_facts(0).major == 9
    mla_call._calls.clear()

    decode(MlaCase(name="", seq_lens=(1024, 900), heads=16, dtype=dtype).build("cuda"))

    (call,) = mla_call._calls.values()
    assert isinstance(call.decode.spec, MlaSm80Spec)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "bf16 over fp8_ds_mla", "bf16 over e4m3"])
def test_little_work_uses_a_smaller_tile(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tiles of sixteen rows occupy more SMs than two of 64."""
    case = case_of_kind(KINDS[kind], name="", seq_lens=(1030,), heads=128, with_sinks=True)
    problem = case.build("cuda")
    with smaller_tiles(monkeypatch, enabled=True):
        problem.check(*compute(problem))

        (call,) = mla_call._calls.values()
        assert isinstance(call.decode.spec, MlaSm90Spec)
        assert call.decode.spec.block_m == 16
        assert repeat(problem, 100) == 0


def test_descending_offsets_write_nothing() -> None:
    """Their work could exceed 32-bit linear block indices; a later call is right."""
    problem = MlaCase(name="", seq_lens=(300,) * 200, q_lens=(2,) * 200, heads=64).build("cuda")
    right = decode(problem)
    out = torch.full_like(right, 7.0)
    ends = torch.tensor([0, 400] * 100 + [0], dtype=torch.int32, device="cuda")

    decode(problem, out=out, cum_seq_lens_q=ends)

    assert torch.equal(out, torch.full_like(out, 7.0))
    assert torch.equal(decode(problem), right)
