"""Invalid arguments of grouped-query decode beyond the rules of every tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mlagen.errors import UnsupportedError
from tests.families.rejections import GQA, Row, Rows, broken, check, displaced, padded, valid_call
from tests.problems.entry_points import run_xqa
from tests.problems.problem import E4M3, bf16

POSITIVE = ": expected an int, 1 or more, got "
FACTOR = ": expected a finite number above 0, got "
HALF_HEADS = {"query": lambda q: q[..., :64]}
BATCH_TOKENS = "(batch * q_len_per_req)"
NOT_GIVEN = ": expected a torch.Tensor, got NoneType"
MASK_32 = ".shape: expected [2, 2, 1] or [4, 1]"
MASK_WORDS = " (a bit for each of 2 drafts, in 32-bit words), got "
SHAPE_OF_SINKS = ".shape: expected [8] or [2, 4] (heads of query), got "


def stacked_with_a_gap(caches: torch.Tensor) -> torch.Tensor:
    """Return a copy whose values are 8 bytes after a 16-byte boundary."""
    pages, elements = len(caches), caches[0, 0].numel()
    memory = torch.zeros(pages, 2 * elements + 8, dtype=caches.dtype)
    strides = (2 * elements + 8, elements + 4, *caches.stride()[2:])
    return memory.as_strided(caches.shape, strides).copy_(caches)


class Unread(torch.Tensor):
    """A tensor whose contents must not be read."""

    @classmethod
    def __torch_function__(cls, func: Any, *_: Any) -> Any:
        """Reject any use of the tensor except its type name."""
        raise AssertionError(f"read by {func}")


UNREAD = torch.tensor(70).as_subclass(Unread)
ROWS: Rows = {
    "xqa_batch": [
        ("query", lambda q: q[:, None], ".ndim: expected 3, got 4"),
        ("query", lambda q: q[:, :0], ".shape[-2]: expected 1 head or more, got 0"),
        ("query", lambda q: q[:, :7], ".shape[-2]: expected a multiple of 2 (heads of kv_cache[0"),
        ("kv_cache[0]", HALF_HEADS, ".shape[-1]: expected 64 (head_dim of query), got 128"),
        ("q_len_per_req", 0, POSITIVE + "0"),
        ("seq_lens", lambda lens: lens.repeat(2), ".shape: expected [2] or [2, 1] (batch of query"),
        ("seq_lens", lambda lens: lens[:, None].repeat(1, 2), ".shape: expected [2] or [2, 1] (ba"),
        ("kv_cache", None, ": expected a torch.Tensor, got NoneType"),
        ("kv_cache", lambda kv: (*kv, kv[1]), ": expected a tensor, or two in a tuple or list, g"),
        ("kv_cache[0]", lambda kv: kv[0], ".ndim: expected 4, got 3"),
        ("kv_cache", lambda kv: kv[0], ".ndim: expected 5, got 4"),
        ("kv_cache", lambda kv: torch.stack([kv[0]] * 3, dim=1), ".shape[1]: expected 2, or 1 wh"),
        (
            "kv_cache",
            lambda kv: torch.stack(kv, dim=1).double(),
            ".dtype: expected torch.bfloat16 or torch.float8_e4m3fn or torch.float8_e5m2 or torch.",
        ),
        ("kv_cache[1]", lambda kv: kv[1:], ".shape: expected [10, 16, 2, 128] (shape of kv_cache"),
        (
            "kv_cache[1]",
            lambda kv: kv[..., :8],
            ".shape[-1]: expected a multiple of 16 up to 128 (",
        ),
        (
            "kv_cache[1]",
            lambda kv: kv.repeat(1, 1, 1, 2),
            ".shape[-1]: expected a multiple of 16 up",
        ),
        ("kv_cache", lambda kv: [each[:, :, :0] for each in kv], "[0]: expected 1 head or more, "),
        ("kv_cache", lambda kv: [each[:, :0] for each in kv], "[0]: expected 1 token or more in "),
        ("kv_cache", lambda kv: [each.half() for each in kv], "[0].dtype: expected torch.bfloat1"),
        ("kv_layout", "nhd", ": expected one of NHD, HND, got 'nhd'"),
        ("kv_cache_sf", lambda _: [bf16(1)] * 2, "[0]: expected None for a cache of torch.bfloat"),
        ("block_tables", lambda ids: ids[:, None], ".ndim: expected 2, got 3"),
        ("block_tables", lambda ids: ids[:1], ".shape[0]: expected 2 (batch), got 1"),
        ("max_seq_len", -1, ": expected an int, 0 or more, got -1"),
        ("max_seq_len", {"max_seq_len": UNREAD}, ": expected an int, 0 or more, got a tensor"),
        ("window_left", torch.tensor(1), ": expected an int, got a tensor"),
        ("o_scale", 0.0, FACTOR + "0.0"),
        ("o_scale", math.nan, FACTOR + "nan"),
        ("o_scale", math.inf, FACTOR + "inf"),
        ("o_scale", 1e39, ": expected a number that float32 can hold, got 1e+39"),
        ("o_scale", torch.tensor(1.0), ": expected a float, got a tensor"),
        ("sinks", torch.zeros(4), SHAPE_OF_SINKS + "[4]"),
        ("sinks", torch.zeros(4, 2), SHAPE_OF_SINKS + "[4, 2]"),
        ("out", bf16(2, 8, 128).to(E4M3), ".dtype: expected torch.bfloat16 (dtype of query; e4m3 "),
    ],
    "xqa_batch drafts": [
        ("query", lambda q: q[:3], ".shape[0]: expected a multiple of 2 (q_len_per_req), got 3"),
        ("mask", lambda m: m.bool(), ".dtype: expected torch.uint16 or torch.uint32 or torch.int"),
        ("mask", lambda m: m[..., :1], f".shape: expected [2, 2, 2] or [4, 2]{MASK_WORDS}[2, 2, 1"),
        ("mask", lambda m: m.view(torch.uint32).repeat(1, 1, 2), f"{MASK_32}{MASK_WORDS}[2, 2, 2]"),
        ("mask", lambda m: m[:, :1], f".shape: expected [2, 2, 2] or [4, 2]{MASK_WORDS}[2, 1, 2]"),
        ("out", bf16(2, 2, 8, 64), ".shape: expected [4, 8, 128] or [2, 2, 8, 128], got [2, 2, 8"),
    ],
    "xqa_batch ragged": [
        ("q_len_per_req", 1, ": expected 2 or more with q_cu_seq_lens, got 1"),
        ("query", {"q_len_per_req": 2}, f".shape[0]: expected 4 or less {BATCH_TOKENS}, got 5"),
        ("q_cu_seq_lens", lambda ends: ends[:2], ".shape: expected [3] (batch + 1), got [2]"),
        ("mask", lambda m: m[None], ".shape: expected [5, 2] (a bit for each of 4 drafts, in 32-"),
        ("out", bf16(1, 5, 8, 128), ".shape: expected [5, 8, 128], got [1, 5, 8, 128]"),
    ],
    "xqa": [
        ("q", lambda q: q[:, 0], ".ndim: expected 4 or 5, got 3"),
        ("k_cache", lambda kv: torch.stack([kv, kv], dim=1), ".ndim: expected 4, got 5"),
        ("k_sf_cache", {"v_sf_cache": bf16(1)}, ": expected a torch.Tensor, got NoneType"),
        ("num_kv_heads", 16, ": expected 2 (of k_cache), got 16"),
        ("page_size", 32, ": expected 16 (of k_cache), got 32"),
        ("kv_layout", "DHN", ": expected one of NHD, HND, got 'DHN'"),
        ("sm_count", 0, POSITIVE + "0"),
        ("output", bf16(2, 8, 128), ".shape: expected [2, 1, 8, 128], got [2, 8, 128]"),
        ("page_table", lambda ids: ids[:, None], ".ndim: expected 2, got 3"),
        ("sliding_win_size", 0.5, ": expected an int, got 0.5"),
        ("rcp_out_scale", 0.0, FACTOR + "0.0"),
    ],
    "xqa drafts": [
        ("q", lambda q: q[:, 0], ".ndim: expected 5, got 4"),
        ("q", lambda q: q.repeat(1, 2, 1, 1, 1), ".shape[1]: expected 1, got 2"),
        ("q", lambda q: q[:, :, :1], ".shape[2]: expected 2 (q_seq_len), got 1"),
        ("q", lambda q: padded(q, dim=2), ".stride(0): expected 2048 (q_len * stride of a query "),
    ],
    "xqa ragged": [
        ("q_seq_len", 1, ": expected 2 or more with q_cu_seq_lens, got 1"),
        ("q", lambda q: q[:, None], ".ndim: expected 3, got 4"),
    ],
    "xqa_batch e4m3": [
        ("kv_cache_sf", bf16(1), ": expected None, or fp32 of each token and KV head, for a cach"),
        ("out", bf16(2, 8, 128).half(), ".dtype: expected torch.bfloat16 or torch.float8_e4m3fn "),
    ],
    "xqa_batch stacked": [
        ("kv_cache", stacked_with_a_gap, ".data_ptr(): expected a multiple of 16, got 8 more tha")
    ],
    "xqa_batch nvfp4": [
        ("kv_cache_sf", None, ": expected a torch.Tensor, got NoneType"),
        ("kv_cache_sf", lambda sf: sf[:1], ": expected a tensor, or two in a tuple or list, got "),
        ("kv_cache_sf[1]", lambda sf: sf[..., :4], ".shape: expected [10, 16, 2, 8] (one for 16 "),
        (
            "kv_cache_sf[0]",
            {"kv_cache": lambda kv: [each.transpose(1, 2) for each in kv], "kv_layout": "HND"},
            ".shape: expected [10, 2, 16, 8] (one for 16 elements of the cache), got [10, 16",
        ),
        ("kv_cache[0]", HALF_HEADS, ".shape[-1]: expected 32 (head_dim of query / 2), got 64"),
    ],
    "xqa_batch token scales": [
        (
            "kv_cache_sf[0]",
            lambda sf: sf[..., :1],
            ".shape: expected [10, 16, 2] (one for a token ",
        ),
        ("kv_cache_sf[1]", lambda sf: sf.mT, ".shape: expected [10, 16, 2] (one for a token and K"),
        ("kv_cache_sf[1]", lambda sf: sf[..., None], ".ndim: expected 3, got 4"),
        ("kv_cache_sf[1]", lambda sf: sf.half(), ".dtype: expected torch.float32 (dtype of kv_cac"),
        (
            "kv_cache_sf[1]",
            lambda sf: sf.to("meta"),
            ".device: expected cpu (of the first tensor), got meta",
        ),
        ("kv_cache[0]", displaced, ".data_ptr(): expected a multiple of 4, got 1 more than one"),
        ("kv_cache[1]", lambda kv: padded(kv, dim=3), ".stride(1): expected a multiple of 4, got"),
    ],
    "xqa_batch token scales stacked": [
        ("kv_cache_sf", lambda sf: sf[:, 0], ".ndim: expected 4, got 3"),
        ("kv_cache_sf", lambda sf: sf.double(), ": expected None, or fp32 of each token and KV he"),
    ],
    "xqa token scales": [("v_sf_cache", None, NOT_GIVEN)],
    "xqa_batch nvfp4 24 bytes": [
        ("kv_cache[0]", displaced, ".data_ptr(): expected a multiple of 8, got 1 more than one")
    ],
    "xqa_batch nvfp4 32 bytes": [
        ("kv_cache[0]", lambda kv: displaced(kv, 8), ".data_ptr(): expected a multiple of 16, go")
    ],
    "xqa HND": [
        ("num_kv_heads", {"num_kv_heads": 16, "page_size": 2}, ": expected 2 (of k_cache), got 16")
    ],
    "xqa_batch lse": [
        ("mask", {"causal": False}, ": expected None with causal=False, got a mask"),
        (
            "window_left",
            {"causal": False, "mask": None, "window_left": 5},
            ": expected no window with causal=False, got 6",
        ),
        ("causal", "no", ": expected "),
        ("return_lse", "no", ": expected "),
        ("return_lse_base", "base10", ": expected one of base2, basee, got 'base10'"),
        (
            "lse",
            {"return_lse": True, "lse": torch.zeros(2, 8)},
            ".shape: expected [4, 8] or [2, 2, 8], got [2, 8]",
        ),
        ("lse", torch.zeros(4, 8).half(), ".dtype: expected torch.float32"),  # without return_lse
    ],
    "xqa lse": [
        ("mask", {"causal": False}, ": expected None with causal=False, got a mask"),
        ("lse_base", "base10", ": expected one of base2, basee, got 'base10'"),
        ("lse", torch.zeros(4, 7), ".shape: expected [4, 8] or [2, 1, 2, 8] or [2, 2, 8], got [4"),
    ],
    "xqa nvfp4": [
        ("v_sf_cache", None, NOT_GIVEN),
        ("k_sf_cache", {"k_sf_cache": None, "v_sf_cache": None}, NOT_GIVEN),
    ],
}


@broken(ROWS)
def test_a_broken_rule_is_rejected(row: Row) -> None:
    """The message has argument, rule and value, and nothing is written."""
    check(row)


@pytest.mark.parametrize("head_dim", [8, 24, 272, 400, 528])
def test_head_dims_without_a_kernel_are_rejected_on_the_cpu_too(head_dim: int) -> None:
    """The CPU backend rejects what no kernel supports; the message lists supported values."""
    function, _, valid = valid_call("xqa_batch")
    caches = (bf16(10, 16, 2, head_dim), bf16(10, 16, 2, head_dim))

    with pytest.raises(UnsupportedError) as caught:
        function(**valid | {"query": bf16(2, 8, head_dim), "kv_cache": caches, "out": None})

    assert str(caught.value) == (
        f"no GQA decode kernel for head_dim {head_dim}; supported: multiples of 16 up to 256, "
        "and 512"
    )


def test_one_token_on_an_axis_of_its_own() -> None:
    """`[batch, 1, 1, heads, head_dim]` is one query token of each request."""
    problem = GQA.build("cpu")
    output = bf16(2, 1, 1, 8, 128)

    run_xqa(problem, q=problem.query.view(2, 1, 1, 8, 128), output=output)

    problem.check(output)
