"""The MLA decode kernel on a GPU, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

import mlagen
from tests.cases import MlaCase

EDGES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 300)

CASES = (
    *(
        MlaCase(
            name=f"page size {page}", page_size=page, seq_lens=(*EDGES, page - 1, page, page + 1)
        )
        for page in (1, 8, 16, 32, 64, 128)
    ),
    *(
        MlaCase(name=f"{heads} heads", heads=heads, seq_lens=(0, 5, 130), seed=heads)
        for heads in (1, 3, 8, 15, 16, 17, 24, 32, 33, 48, 63, 64, 65, 100, 126, 128, 129, 200, 256)
    ),
    *(
        MlaCase(
            name=f"{q_len} query tokens of {heads} heads",
            heads=heads,
            q_len=q_len,
            seq_lens=(0, 1, q_len - 1, q_len, q_len + 1, 64 + q_len // 2, 200),
            with_sinks=True,
            seed=q_len,
        )
        for heads, q_len in ((1, 2), (1, 33), (3, 7), (16, 2), (16, 4), (24, 3), (128, 2), (128, 4))
    ),
    *(
        MlaCase(
            name=f"{str(dtype)[6:]}, kv_lora_rank {rank}, page {page}, {heads} heads",
            dtype=dtype,
            kv_lora_rank=rank,
            page_size=page,
            heads=heads,
            seq_lens=(0, 1, 33, 70, 257),
            with_sinks=True,
            output_scale=0.7,
        )
        for dtype, rank, page, heads in product(
            (torch.bfloat16, torch.float16), (512, 256), (1, 16, 64), (8, 30, 128)
        )
    ),
    MlaCase(name="long enough to split", seq_lens=(5000,), heads=16),
    MlaCase(name="long enough to split, 128 heads", seq_lens=(5000, 1), heads=128, with_sinks=True),
    MlaCase(
        name="split and ragged", seq_lens=(9000, 0, 40, 2500), heads=5, q_len=3, with_sinks=True
    ),
    MlaCase(name="split, fp16, rank 256", seq_lens=(7001,), dtype=torch.float16, kv_lora_rank=256),
    MlaCase(name="131072 tokens", seq_lens=(131072,), heads=8, page_size=128),
    MlaCase(name="all requests empty", seq_lens=(0, 0, 0), with_sinks=True),
    MlaCase(name="growing scores", seq_lens=(700,), query_magnitude=30.0, heads=128),
    MlaCase(name="no scale", seq_lens=(200,), score_scale=0.0),
    MlaCase(name="negative scale", seq_lens=(200,), score_scale=-0.05),
    *(
        MlaCase(name=f"cache as {form}", seq_lens=(1, 64, 200), cache_form=form, page_size=page)
        for form, page in product(("[P,1,ps,d]", "[P,ps,1,d]", "strided"), (1, 16, 64))
    ),
    MlaCase(
        name="ragged queries", seq_lens=(5, 100, 64, 300, 0), q_lens=(1, 4, 0, 17, 2), heads=16
    ),
    MlaCase(
        name="ragged queries, split", seq_lens=(4000, 33), q_lens=(3, 1), heads=128, with_sinks=True
    ),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_is_attention_as_float64_computes_it(case: MlaCase) -> None:
    """Output and LSE are right, whatever NaN and wild ids stand in what must not be read."""
    problem = case.build("cuda")

    out, lse = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        **problem.arguments(return_lse=True)
    )

    problem.check(out, lse)


def test_scales_may_be_tensors() -> None:
    """A scale in an fp32 tensor counts like the same float, also where the work is split."""
    for seq_lens in ((70, 3), (5000,)):
        problem = MlaCase(name="", seq_lens=seq_lens, score_scale=0.05, output_scale=1.5).build(
            "cuda"
        )
        arguments = problem.arguments(
            bmm1_scale=torch.tensor(0.05, device="cuda"),
            bmm2_scale=torch.tensor([1.5], device="cuda"),
        )

        out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

        problem.check(out)


@pytest.mark.parametrize("seq_lens", [(70, 3, 0), (5000,)], ids=["whole", "split"])
def test_natural_lse_and_outputs_of_the_caller(seq_lens: tuple[int, ...]) -> None:
    """`out` and `lse` are written in place in the caller's shapes, the LSE in the asked-for base."""
    problem = MlaCase(name="", seq_lens=seq_lens, heads=20, with_sinks=True).build("cuda")
    batch = len(seq_lens)
    out = torch.full((batch, 20, 512), math.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((batch, 1, 20), math.nan, device="cuda")

    result = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        **problem.arguments(out=out, lse=lse, return_lse=True, return_lse_base="basee")
    )

    assert result[0] is out
    assert result[1] is lse
    problem.check(out, lse, natural=True)


def test_a_hidden_token_with_nan_reaches_no_row_that_may_not_see_it() -> None:
    """NaN in the newest token is seen by the last query token and by no other."""
    case = MlaCase(name="", seq_lens=(100, 64, 33), q_len=4, heads=16)
    problem = case.build("cuda")
    for request, length in enumerate(case.seq_lens):
        page = int(problem.block_tables[request, (length - 1) // 64])
        problem.kv_cache[page, (length - 1) % 64] = math.nan

    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments())

    assert out[:, 3].isnan().all()
    clean = replace(case, seq_lens=case.seq_lens).build("cuda")
    expected = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**clean.arguments())
    assert torch.equal(out[:, :3], expected[:, :3])


def test_wild_page_ids_inside_a_request_do_not_fault() -> None:
    """An id that is no page of the cache harms only its own request."""
    problem = MlaCase(name="", seq_lens=(200, 200, 5000), heads=16).build("cuda")
    tables = problem.block_tables.clone()
    tables[0, :3] = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32)

    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments(block_tables=tables))
    torch.cuda.synchronize()
    expected = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments())

    assert torch.equal(out[1:], expected[1:])


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

    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        **problem.arguments(kv_cache=cache, block_tables=tables)
    )

    problem.check(out)


def test_lengths_beyond_the_table_are_cut() -> None:
    """A length that the block table cannot hold is read as the most that it can."""
    problem = MlaCase(name="", seq_lens=(128, 64), spare_pages=0).build("cuda")
    too_long = torch.tensor([1000, 64], dtype=torch.int32, device="cuda")

    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments(seq_lens=too_long))

    problem.check(out)


def test_nothing_outside_the_result_is_written() -> None:
    """Guard bands around output, LSE and workspace keep their bytes."""
    problem = MlaCase(name="", seq_lens=(3000, 17), heads=24, with_sinks=True).build("cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    assert sms > 0
    needed = mlagen.workspace_bytes(batch=2, q_len=1, heads=24, max_seq_len=3000)
    assert needed > 0
    band = 4096
    workspace = torch.full((band + needed + band,), 0x5A, dtype=torch.uint8, device="cuda")
    out = torch.full((2 + 2, 24, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((2 + 2, 24), 7.0, device="cuda")

    mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        **problem.arguments(
            workspace_buffer=workspace[band : band + needed],
            out=out[1:3],
            lse=lse[1:3],
            return_lse=True,
        )
    )

    problem.check(out[1:3], lse[1:3])
    assert (workspace[:band] == 0x5A).all()
    assert (workspace[-band:] == 0x5A).all()
    assert (out[[0, 3]] == 7.0).all()
    assert (lse[[0, 3]] == 7.0).all()


def test_the_same_plan_gives_the_same_bits() -> None:
    """A repeated call gives bitwise the same result."""
    problem = MlaCase(name="", seq_lens=(5000, 77, 900), heads=128).build("cuda")
    arguments = problem.arguments()
    first = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    again = [mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments) for _ in range(50)]

    assert all(torch.equal(first, other) for other in again)
