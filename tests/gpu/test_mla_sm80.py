"""The sm80 MLA kernel on a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen.settings import current_settings
from tests.device_sync import no_device_sync
from tests.mla_cases import CASES
from tests.mla_semantics import MlaSemantics
from tests.mla_variant_semantics import MlaVariantSemantics
from tests.problems.entry_points import compute, decode, decode_with_lse
from tests.problems.mla import MlaCase


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_lse_match_float64(case: MlaCase) -> None:
    """Output and LSE are right with NaN and invalid page ids in all unused memory."""
    problem = case.build("cuda")

    out, lse = compute(problem)

    problem.check(out, lse)


class TestMlaOnGpu(MlaSemantics):
    """Shared tests, on a GPU."""

    device = "cuda"


class TestVariantsOnGpu(MlaVariantSemantics):
    """Shared tests of sparse, biased, FP8 and other variants, on a GPU."""

    device = "cuda"


def test_offsets_beyond_32_bits() -> None:
    """Pages beyond 2^32 bytes of the cache are read correctly."""
    pages, page_size = 66_000, 64
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    problem = MlaCase(name="", seq_lens=(300,), heads=16).build("cuda")
    cache = torch.full((pages, page_size, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    used = 5
    high = torch.arange(pages - used, pages, device="cuda")
    cache[high] = problem.kv_cache[problem.block_tables[0, :used].long()]
    tables = problem.block_tables.clone()
    tables[0, :used] = high.int()

    out = decode(problem, kv_cache=cache, block_tables=tables)

    problem.check(out)


LONG = MlaCase(name="bf16", seq_lens=(3000, 17), heads=24, with_sinks=True)
E4M3 = torch.float8_e4m3fn
GUARDED: dict[MlaCase, dict[str, Any]] = {
    LONG: {},
    replace(LONG, name="e4m3", dtype=E4M3): {"dtype": E4M3},
    replace(LONG, name="fp8_ds_mla", kv_format="fp8_ds_mla"): {"kv_dtype": torch.uint8},
    replace(LONG, name="sparse", top_k=2048): {"sparse_mla_top_k": 2048},
    replace(LONG, name="values in other pages", values="other pages"): {},
    replace(LONG, name="ragged", q_lens=(1, 3)): {"q_len": 3, "tokens": 4},
}


@pytest.mark.parametrize("case", GUARDED, ids=str)
def test_nothing_outside_the_result_is_written(case: MlaCase) -> None:
    """Guard bands around output, LSE and workspace keep their bytes."""
    problem = case.build("cuda")
    sizes: dict[str, Any] = {"batch": 2, "q_len": 1, "heads": 24, "max_seq_len": 3000}
    needed = mlagen.workspace_bytes(**sizes | GUARDED[case])
    band, tokens = 4096, sum(problem.q_lens)
    workspace = torch.full((band + needed + band,), 0x5A, dtype=torch.uint8, device="cuda")
    out = torch.full((1 + tokens + 1, 24, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((1 + tokens + 1, 24), 7.0, device="cuda")

    decode_with_lse(
        problem, workspace_buffer=workspace[band : band + needed], out=out[1:-1], lse=lse[1:-1]
    )

    problem.check(out[1:-1], lse[1:-1])
    assert needed > 0
    assert (workspace[:band] == 0x5A).all()
    assert (workspace[-band:] == 0x5A).all()
    assert (out[[0, -1]] == 7.0).all()
    assert (lse[[0, -1]] == 7.0).all()


def test_ragged_queries_do_not_synchronize() -> None:
    """Without max_q_len the query lengths are read on the device."""
    problem = MlaCase(name="", seq_lens=(700, 3), q_lens=(1, 5)).build("cuda")
    arguments = problem.arguments(max_q_len=None)
    entry_point = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
    entry_point(**arguments)

    with no_device_sync():
        out = entry_point(**arguments)

    assert isinstance(out, torch.Tensor)
    problem.check(out)


def test_mlagen_check_reports_device_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MLAGEN_CHECK=1 an invalid page id is reported, also by a cached call."""
    problem = MlaCase(name="", seq_lens=(700, 3)).build("cuda")
    out = decode(problem)
    tables = problem.block_tables.clone()
    tables[0, 2] = -1
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with pytest.raises(mlagen.ArgumentError) as caught:
        decode(problem, block_tables=tables)

    pages = len(problem.kv_cache) - 1
    assert str(caught.value) == (
        f"block_tables[0, 2]: expected 0 to {pages} (pages of the cache), got -1"
    )
    assert torch.equal(decode(problem), out)


def test_mlagen_check_excludes_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks synchronize, which a capture does not allow."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cuda")
    arguments = problem.arguments()
    decode(problem)
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        problem.query.clone()  # torch warns about an empty graph
        with pytest.raises(mlagen.CaptureError, match=r"^MLAGEN_CHECK: "):
            mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)


@pytest.mark.parametrize("scale", [1e39, 10**400], ids=["float", "int"])
def test_a_scale_beyond_float32_is_rejected(scale: float) -> None:
    """A cached call rejects it, too, before anything is written."""
    problem = MlaCase(name="", seq_lens=(70, 3)).build("cuda")
    out = torch.full((2, 1, 16, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    decode(problem, out=out, bmm1_scale=1.0 if isinstance(scale, float) else 1)
    out.fill_(7.0)

    with pytest.raises(mlagen.ArgumentError, match=r"^bmm1_scale: expected a number that float32"):
        decode(problem, out=out, bmm1_scale=scale)

    assert (out == 7.0).all()


def test_the_same_plan_gives_the_same_bits() -> None:
    """A repeated call gives a bitwise equal result."""
    problem = MlaCase(name="", seq_lens=(5000, 77, 900), heads=128).build("cuda")
    first = decode(problem)

    again = [decode(problem) for _ in range(50)]

    assert all(torch.equal(first, other) for other in again)
