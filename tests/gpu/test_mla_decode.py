"""The MLA decode kernel on a GPU, against float64."""

from __future__ import annotations

import math

import pytest
import torch

import mlagen
from tests.cases import MlaCase
from tests.mla_cases import CASES
from tests.mla_semantics import MlaSemantics, decode, decode_with_lse


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_is_attention_as_float64_computes_it(case: MlaCase) -> None:
    """Output and LSE are right, whatever NaN and wild ids stand in what must not be read."""
    problem = case.build("cuda")

    out, lse = decode_with_lse(problem)

    problem.check(out, lse)


class TestOnTheGpu(MlaSemantics):
    """Every promise of the entry point, kept by the kernels."""

    device = "cuda"


def test_offsets_beyond_32_bits() -> None:
    """Pages that lie more than 2^32 bytes into the cache are read where they are."""
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


def test_nothing_outside_the_result_is_written() -> None:
    """Guard bands around output, LSE and workspace keep their bytes."""
    problem = MlaCase(name="", seq_lens=(3000, 17), heads=24, with_sinks=True).build("cuda")
    needed = mlagen.workspace_bytes(batch=2, q_len=1, heads=24, max_seq_len=3000)
    band = 4096
    workspace = torch.full((band + needed + band,), 0x5A, dtype=torch.uint8, device="cuda")
    out = torch.full((2 + 2, 24, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((2 + 2, 24), 7.0, device="cuda")

    decode_with_lse(
        problem, workspace_buffer=workspace[band : band + needed], out=out[1:3], lse=lse[1:3]
    )

    problem.check(out[1:3], lse[1:3])
    assert needed > 0
    assert (workspace[:band] == 0x5A).all()
    assert (workspace[-band:] == 0x5A).all()
    assert (out[[0, 3]] == 7.0).all()
    assert (lse[[0, 3]] == 7.0).all()


def test_the_same_plan_gives_the_same_bits() -> None:
    """A repeated call gives bitwise the same result."""
    problem = MlaCase(name="", seq_lens=(5000, 77, 900), heads=128).build("cuda")
    first = decode(problem)

    again = [decode(problem) for _ in range(50)]

    assert all(torch.equal(first, other) for other in again)
