"""Bad inputs of MLA decode, message by message; a refused call has written nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mlagen
from mlagen.errors import UnsupportedError
from tests.api.refusals import (
    RAGGED,
    UNIFORM,
    Refusal,
    check,
    padded,
    refusals,
    strided,
)
from tests.cases import MlaCase


@refusals(
    Refusal("no tensor", lambda _: {"query": None}, "query: expected a torch.Tensor, got NoneType"),
    Refusal(
        "three dimensions without cum_seq_lens_q",
        lambda p: {"query": p.query[:, 0]},
        "query.ndim: expected 4, got 3",
    ),
    Refusal(
        "four dimensions with cum_seq_lens_q",
        lambda p: {"query": p.query[:, None]},
        "query.ndim: expected 3, got 4",
        RAGGED,
    ),
    Refusal(
        "float32",
        lambda p: {"query": p.query.float()},
        "query.dtype: expected torch.bfloat16 or torch.float16, got torch.float32",
    ),
    Refusal(
        "another width",
        lambda p: {"query": p.query[..., :512]},
        "query.shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim), got 512",
    ),
    Refusal(
        "gaps in a row",
        lambda p: {"query": strided(p.query)},
        "query.stride(-1): expected 1, got 2",
    ),
    Refusal(
        "rows that are no whole 16 bytes apart",
        lambda p: {"query": padded(p.query, 4)},
        "query.stride(2): expected a multiple of 8, got 580",
    ),
    Refusal(
        "no heads",
        lambda p: {"query": p.query[:, :, :0]},
        "query.shape[-2]: expected 1 to 256 heads, got 0",
    ),
    Refusal(
        "too many heads",
        lambda p: {"query": p.query.repeat(1, 1, 17, 1)},
        "query.shape[-2]: expected 1 to 256 heads, got 272",
    ),
    Refusal(
        "no query tokens",
        lambda p: {"query": p.query[:, :0]},
        "query.shape[1]: expected 1 or more, got 0",
    ),
    Refusal(
        "a gap between requests",
        lambda p: {"query": padded(p.query, 1, dim=1)},
        "query.stride(0): expected 18432 (q_len * stride of a query token), got 27648",
    ),
)
def test_query(refusal: Refusal) -> None:
    """Form, dtype, strides and sizes of the query are checked."""
    check(refusal)


@refusals(
    Refusal(
        "no tensor",
        lambda p: {"kv_cache": (p.kv_cache, p.kv_cache)},
        "kv_cache: expected a torch.Tensor, got tuple",
    ),
    Refusal(
        "another device",
        lambda p: {"kv_cache": p.kv_cache.to("meta")},
        "kv_cache.device: expected cpu (of query), got meta",
    ),
    Refusal(
        "two dimensions",
        lambda p: {"kv_cache": p.kv_cache[0]},
        "kv_cache.ndim: expected 3 or 4, got 2",
    ),
    Refusal(
        "four dimensions without one of size 1",
        lambda p: {"kv_cache": p.kv_cache[:, None].expand(-1, 2, -1, -1)},
        "kv_cache.shape: expected [pages, 1, page_size, head_dim] or "
        "[pages, page_size, 1, head_dim], got [7, 2, 64, 576]",
    ),
    Refusal(
        "another dtype than the query",
        lambda p: {"kv_cache": p.kv_cache.half()},
        "kv_cache.dtype: expected torch.bfloat16 (dtype of query), got torch.float16",
    ),
    Refusal(
        "another width",
        lambda p: {"kv_cache": p.kv_cache[..., :320]},
        "kv_cache.shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim), got 320",
    ),
    Refusal(
        "gaps in a token",
        lambda p: {"kv_cache": strided(p.kv_cache)},
        "kv_cache.stride(-1): expected 1, got 2",
    ),
    Refusal(
        "tokens that are no whole 16 bytes apart",
        lambda p: {"kv_cache": padded(p.kv_cache, 1)},
        "kv_cache.stride(1): expected a multiple of 8, got 577",
    ),
)
def test_kv_cache(refusal: Refusal) -> None:
    """Form, dtype, device and strides of the cache are checked."""
    check(refusal)


@refusals(
    Refusal(
        "a list",
        lambda _: {"seq_lens": [70, 3]},
        "seq_lens: expected a torch.Tensor, got list",
    ),
    Refusal(
        "another device",
        lambda p: {"seq_lens": p.seq_lens.to("meta")},
        "seq_lens.device: expected cpu (of query), got meta",
    ),
    Refusal(
        "int64",
        lambda p: {"seq_lens": p.seq_lens.long()},
        "seq_lens.dtype: expected torch.int32 or torch.uint32, got torch.int64",
    ),
    Refusal(
        "two dimensions",
        lambda p: {"seq_lens": p.seq_lens[:, None]},
        "seq_lens.ndim: expected 1, got 2",
    ),
    Refusal(
        "gaps",
        lambda p: {"seq_lens": strided(p.seq_lens)},
        "seq_lens.stride(): expected contiguous for shape [2], got (2,)",
    ),
    Refusal(
        "another batch",
        lambda p: {"seq_lens": p.seq_lens.repeat(2)},
        "seq_lens.shape: expected [2] (batch of query), got [4]",
    ),
    Refusal(
        "no tables",
        lambda _: {"block_tables": None},
        "block_tables: expected a torch.Tensor, got NoneType",
    ),
    Refusal(
        "tables on another device",
        lambda p: {"block_tables": p.block_tables.to("meta")},
        "block_tables.device: expected cpu (of query), got meta",
    ),
    Refusal(
        "int64 tables",
        lambda p: {"block_tables": p.block_tables.long()},
        "block_tables.dtype: expected torch.int32 or torch.uint32, got torch.int64",
    ),
    Refusal(
        "tables of keys and values apart",
        lambda p: {"block_tables": p.block_tables[:, None].expand(-1, 2, -1)},
        "block_tables.ndim: expected 2, got 3",
    ),
    Refusal(
        "gaps in a table",
        lambda p: {"block_tables": strided(p.block_tables)},
        "block_tables.stride(-1): expected 1, got 2",
    ),
    Refusal(
        "tables of another batch",
        lambda p: {"block_tables": p.block_tables[:1]},
        "block_tables.shape[0]: expected 2 (batch), got 1",
    ),
)
def test_lengths_and_tables(refusal: Refusal) -> None:
    """Both are 32-bit, of the query's batch and device, without gaps."""
    check(refusal)


@refusals(
    Refusal(
        "a negative length",
        lambda _: {"max_seq_len": -1},
        "max_seq_len: expected an int, 0 or more, got -1",
    ),
    Refusal(
        "a fraction",
        lambda _: {"max_seq_len": 70.0},
        "max_seq_len: expected an int, 0 or more, got 70.0",
    ),
    Refusal(
        "a bool",
        lambda _: {"max_seq_len": True},
        "max_seq_len: expected an int, 0 or more, got True",
    ),
    Refusal(
        "text for a dimension",
        lambda _: {"kv_lora_rank": "512"},
        "kv_lora_rank: expected an int, 0 or more, got '512'",
    ),
    Refusal(
        "a negative dimension",
        lambda _: {"qk_rope_head_dim": -64},
        "qk_rope_head_dim: expected an int, 0 or more, got -64",
    ),
)
def test_whole_numbers(refusal: Refusal) -> None:
    """Lengths and dimensions are ints that are not negative."""
    check(refusal)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"page_size": 48},
            (
                "no MLA decode kernel for query bf16, cache bf16, kv_lora_rank 512, "
                "qk_rope_head_dim 64, page_size 48; page_size may be 1, 8, 16, 32, 64, 128"
            ),
        ),
        (
            {"kv_lora_rank": 384, "dtype": torch.float16},
            (
                "no MLA decode kernel for query fp16, cache fp16, kv_lora_rank 384, "
                "qk_rope_head_dim 64; supported: "
                "query bf16, cache bf16, kv_lora_rank 512, qk_rope_head_dim 64; "
                "query bf16, cache bf16, kv_lora_rank 256, qk_rope_head_dim 64; "
                "query fp16, cache fp16, kv_lora_rank 512, qk_rope_head_dim 64; "
                "query fp16, cache fp16, kv_lora_rank 256, qk_rope_head_dim 64"
            ),
        ),
    ],
    ids=["page size", "latent dimension"],
)
def test_what_no_kernel_covers_is_refused_on_the_cpu_too(
    changes: dict[str, Any], message: str
) -> None:
    """A call that works without a GPU is one that has a kernel; the message lists what does."""
    problem = MlaCase(name="", seq_lens=(70, 3), **changes).build("cpu")

    with pytest.raises(UnsupportedError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments())

    assert str(caught.value) == message


def test_a_device_without_a_backend_is_refused() -> None:
    """Tensors are on a GPU or on the CPU."""
    problem = UNIFORM.build("cpu")
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens")
    arguments = problem.arguments()
    arguments |= {name: arguments[name].to("meta") for name in names}

    with pytest.raises(UnsupportedError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    assert str(caught.value) == "query.device: expected cuda or cpu, got meta"


@pytest.mark.parametrize("argument", ["query", "kv_cache"])
def test_fp8_is_not_implemented_yet(argument: str) -> None:
    """A dtype that the interface knows and no kernel covers is told apart from a mistake."""
    problem = UNIFORM.build("cpu")
    tensor = problem.arguments()[argument].to(torch.float8_e4m3fn)

    with pytest.raises(UnsupportedError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments(**{argument: tensor}))

    expected = "torch.bfloat16 or torch.float16"
    told = f"{argument}.dtype: not implemented, expected {expected}, got torch.float8_e4m3fn"
    assert str(caught.value) == told
