"""The Hopper MLA kernels: right, and the same in whatever order warps and blocks arrive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import mlagen
from mlagen import engine
from mlagen.api import mla_call
from mlagen.runtime import device, plan_mla_sm90
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.mla import MlaSm80Spec
from mlagen.spec.mla_sm90 import MlaSm90Spec
from mlagen.spec.mla_sm90_calls import mla_sm90_kernel
from mlagen.spec.mla_sm90_fp8 import MlaSm90Fp8Spec
from mlagen.spec.mla_support import MlaVariant
from tests.cases import MlaCase, MlaProblem
from tests.graph_replay import captured
from tests.hopper_tiles import taking_hopper_kernels, taking_smaller_tiles
from tests.launch_repeats import counters_left, delayed_launches, mismatches, with_delays
from tests.mla_cases import KINDS, of_kind
from tests.mla_semantics import compute, decode

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

E4M3 = torch.float8_e4m3fn
FAMILIES = {
    torch.bfloat16: MlaSm90Spec,
    torch.float16: MlaSm90Spec,
    E4M3: MlaSm90Fp8Spec,
}

# Of every width of tile: one request in many pieces, some in a few, and many beside each other.
WIDTHS = {"16 rows": (16, 1), "32 rows": (16, 2), "64 rows": (64, 1), "teams of 2": (128, 1)}
LENGTHS = {
    "many pieces": (9000,),
    "as many pieces as can be": (16000,),
    "one long, one short": (20000, 2500),
    "few pieces": (5000, 77, 900, 64, 0, 1),
    "alike, cut in equal pieces": (1088,) * 32,
    "alike, cut in halves": (1088,) * 64,
    "two pieces, of which one is followed": (3000,) * 83,
    "many requests": tuple(17 + 67 * i % 911 for i in range(300)),
    "empty requests": (0,) * 1000,
}
CASES = [
    MlaCase(name=f"{width}, {name}", seq_lens=lens, heads=heads, q_len=q_len, with_sinks=True)
    for width, (heads, q_len) in WIDTHS.items()
    for name, lens in LENGTHS.items()
]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have every call of this file take a sm90 kernel, and the tile for its rows."""
    with taking_hopper_kernels(monkeypatch):
        yield


@pytest.mark.parametrize("page_size", [16, 48, 64])
@pytest.mark.parametrize("dtype", FAMILIES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_kernels_are_right(
    case: MlaCase, dtype: torch.dtype, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is within the tolerance of float64, so they are within twice that of each other."""
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
def test_a_thread_counts_the_work_of_several_requests(heads: int, dtype: torch.dtype) -> None:
    """More requests than a block has threads, some empty, and some without a query."""
    requests = range(1100)
    lens = tuple(37 * i % 251 for i in requests)
    case = MlaCase(name="", seq_lens=lens, heads=heads, dtype=dtype, with_sinks=True)
    ragged = replace(case, q_lens=tuple((i % 7 > 0) + (i % 5 == 0) for i in requests))
    for each in (case, ragged):
        problem = each.build("cuda")

        problem.check(*compute(problem))


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_without_a_page_there_is_nothing_to_see(heads: int, dtype: torch.dtype) -> None:
    """Tables of no columns are not read; every row is zero."""
    problem = MlaCase(name="", seq_lens=(0, 0, 0), heads=heads, dtype=dtype).build("cuda")
    tables = problem.arguments()["block_tables"]

    assert not decode(problem, block_tables=tables[:, :0].contiguous()).any()


def repeat(problem: MlaProblem, repeats: int) -> int:
    """Return in how many repetitions any bit differs from the first."""
    out = torch.empty_like(decode(problem))
    arguments = problem.arguments(out=out)

    def compute_again() -> torch.Tensor:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
        return out

    return mismatches(compute_again, repeats)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("case", CASES[::2], ids=str)
def test_ten_thousand_launches_give_the_same_bits(case: MlaCase, dtype: torch.dtype) -> None:
    """No race between blocks or warps shows in a result."""
    problem = replace(case, dtype=dtype).build("cuda")

    assert repeat(problem, 10_000) == 0


# Where warps wait for others, and how long they may sleep before it, in nanoseconds.
DELAYS = {
    "  mbarrier_wait(shared_address(&barrier), parity);\n": 2000,
    "  barrier_sync(kConsumerBarrier, kConsumerThreads);\n": 5000,
    "  reduce_group.sync();\n": 5000,
}


@pytest.mark.parametrize("dtype", [DType.BF16, DType.E4M3], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_delays_change_no_bit(case: MlaCase, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever warp or block comes last, and whatever it finds done, the result is the same."""
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
def test_a_thousand_replays_leave_the_counters_at_zero(case: MlaCase, dtype: torch.dtype) -> None:
    """A replay needs no memset, for every launch leaves what it found."""
    problem = replace(case, dtype=dtype).build("cuda")
    expected = decode(problem).clone()
    arguments = problem.arguments(out=torch.empty_like(expected))
    graph = captured(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla, arguments)

    for _ in range(1000):
        graph.replay()

    torch.cuda.synchronize()
    assert torch.equal(arguments["out"], expected)
    assert counters_left() == 0


@pytest.mark.parametrize("dtype", FAMILIES, ids=str)
def test_a_small_call_takes_the_portable_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is told otherwise."""
    monkeypatch.setenv("MLAGEN_MLA_KERNEL", "auto")
    monkeypatch.setattr(plan_mla_sm90, "LEAVES_SMALL_CALLS", True)
    current_settings.cache_clear()
    assert device.device_facts(0).major == 9
    mla_call._calls.clear()

    decode(MlaCase(name="", seq_lens=(1024, 900), heads=16, dtype=dtype).build("cuda"))

    (call,) = mla_call._calls.values()
    assert isinstance(call.decode.spec, MlaSm80Spec)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "e4m3", "bf16 over fp8_ds_mla", "bf16 over e4m3"])
def test_little_work_takes_a_tile_of_few_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tiles of sixteen heads keep more SMs busy than two of 64."""
    case = of_kind(KINDS[kind], name="", seq_lens=(1030,), heads=128, with_sinks=True)
    problem = case.build("cuda")
    with taking_smaller_tiles(monkeypatch, are_taken=True):
        problem.check(*compute(problem))

        (call,) = mla_call._calls.values()
        assert isinstance(call.decode.spec, MlaSm90Spec)
        assert call.decode.spec.block_m == 16
        assert repeat(problem, 100) == 0


def test_where_offsets_go_back_nothing_is_written() -> None:
    """There could be more work than positions on the line; and a later call is right."""
    problem = MlaCase(name="", seq_lens=(300,) * 200, q_lens=(2,) * 200, heads=64).build("cuda")
    right = decode(problem)
    out = torch.full_like(right, 7.0)
    ends = torch.tensor([0, 400] * 100 + [0], dtype=torch.int32, device="cuda")

    decode(problem, out=out, cum_seq_lens_q=ends)

    assert torch.equal(out, torch.full_like(out, 7.0))
    assert torch.equal(decode(problem), right)
