"""What sparse MLA over two pools rejects, with ``MLAGEN_CHECK=1`` of contents, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.mla import trtllm_batch_decode_sparse_mla_dsv4
from mlagen.settings import current_settings
from tests.problems.dsv4 import Dsv4Case, Dsv4Problem
from tests.problems.dsv4_cases import case
from tests.problems.dsv4_rows import Pages
from tests.problems.problem import E4M3, bf16, ints
from tests.rejected import Row, rejections_of, rejects

CASES: dict[str, Dsv4Case] = {
    "two pools": case("", seq_lens=(40, 3), entries="valid"),
    "two query tokens": case("", seq_lens=(40, 3), q_len=2, entries="valid"),
    "inline": case("", kv_cache_format="fp8_dsv41_inline_fp4_ca", extra=Pages(page_size=32)),
    "HND": case("", cache_layout="HND"),
}


def bytes_of(*shape: int, stride: int = 0, slot: int = 0, offset: int = 0) -> torch.Tensor:
    """Return a pool with other strides, or at an address that is not aligned."""
    pages, size, width = shape
    slot = slot or width
    stride = stride or size * slot
    memory = torch.zeros(offset + pages * stride + width, dtype=torch.uint8)
    return memory[offset:].as_strided(shape, (stride, slot, 1))


def whole(*shape: int) -> torch.Tensor:
    """Return lists of zeros."""
    return torch.zeros(shape, dtype=torch.int32)


SWA, EXTRA = "swa_kv_cache", "compressed_kv_cache"
LISTS, LENS = "sparse_indices", "swa_topk_lens"
MORE, MORE_LENS = "extra_sparse_indices", "extra_sparse_topk_lens"
UNSERVED: dict[str, Any] = {
    **dict.fromkeys(
        (
            *("hca_swa_indices", "hca_compressed_block_tables", "hca_seq_lens"),
            *("remapped_sparse_indices_buffer", "dsv4_inv_rope_cos_sin_cache", "dsv4_output_scale"),
        ),
        ints(1),
    ),
    "hca_sparse_indices_format": "flat",
    "sparse_indices_are_storage_offsets": True,
}
ROWS: dict[str, list[Row]] = {
    "two pools": [
        ("query", None, ": expected a torch.Tensor, got NoneType"),
        ("query", bf16(2, 512), ".ndim: expected 3 or 4, got 2"),
        ("query", bf16(2, 16, 576), ".shape[-1]: expected 512 (elements of a token), got 576"),
        (
            "query",
            bf16(2, 16, 520)[..., 4:516],
            ".data_ptr(): expected a multiple of 16, got 8 ...",
        ),
        (
            "query",
            bf16(2, 257, 512),
            ".shape[-2]: not implemented, expected 1 to 256 heads, got 257",
        ),
        ("query", bf16(2, 0, 512), ".shape[-2]: expected 1 to 256 heads, got 0"),
        ("query", bf16(2, 16, 516)[..., :512], ".stride(...): expected a multiple of 8, got ..."),
        *(
            (
                "query",
                bf16(2, 16, 512).to(dtype),
                f".dtype: not implemented, expected torch.bfloat16, got {dtype}",
            )
            for dtype in (torch.float32, torch.float16, E4M3)
        ),
        (SWA, None, ": expected a torch.Tensor, got NoneType"),
        (SWA, torch.zeros(5, 64, 584), ".dtype: expected torch.uint8, got torch.float32"),
        (SWA, bytes_of(5, 64, 584)[0], ".ndim: expected 3 or 4, got 2"),
        (
            *(SWA, bytes_of(5, 64, 528)),
            ".shape[-1]: expected 584 (bytes of a row; ... of another kv_cache_format), got 528",
        ),
        (
            *(EXTRA, bytes_of(5, 64, 384)),
            ".shape[-1]: expected 584 (bytes of a row; ... of another kv_cache_format), got 384",
        ),
        (SWA, bytes_of(5, 64, 656), ".shape[-1]: expected 584 (...), got 656"),
        (SWA, bytes_of(5, 0, 584), ".shape: expected pages of 1 token or more, got ..."),
        (
            "",
            {SWA: bytes_of(5, 64, 584, slot=592)},
            "stride of a token of swa_kv_cache: expected 584 ..., got 592",
        ),
        (
            SWA,
            bytes_of(5, 64, 584, stride=37360),
            ".stride(0): expected a multiple of 16, 37376 ... got 37360",
        ),
        (
            SWA,
            bytes_of(5, 64, 584, stride=37384),
            ".stride(0): expected a multiple of 16, 37376 ... got 37384",
        ),
        (
            EXTRA,
            bytes_of(5, 2, 584, stride=1160),
            ".stride(0): expected a multiple of 16, 1168 ... got 1160",
        ),
        (
            SWA,
            bytes_of(5, 64, 584, offset=8),
            ".data_ptr(): expected a multiple of 16, got 8 more ...",
        ),
        (
            EXTRA,
            bytes_of(5, 64, 584, offset=8),
            ".data_ptr(): expected a multiple of 16, got 8 more ...",
        ),
        (
            SWA,
            bytes_of(5, 64, 584)[:, None].expand(5, 2, 64, 584),
            ".shape: expected [pages, 1, page_size, 584], got ...",
        ),
        (LISTS, None, ": expected a torch.Tensor, got NoneType"),
        (LENS, None, ": expected a torch.Tensor, got NoneType"),
        (MORE, None, ": expected a torch.Tensor, got NoneType"),
        (MORE_LENS, None, ": expected a torch.Tensor, got NoneType"),
        (EXTRA, None, ": expected a torch.Tensor, got NoneType"),
        (
            LISTS,
            whole(2, 128).long(),
            ".dtype: expected torch.int32 or torch.uint32, got torch.int64",
        ),
        (LISTS, whole(3, 128), ".shape: expected [2, 128] or [2, 1, 128] (...), got [3, 128]"),
        (LISTS, whole(2, 0), ".shape[-1]: expected 1 or more, got 0"),
        (MORE, whole(2, 0), ".shape[-1]: expected 1 or more, got 0"),
        (LISTS, whole(128), ".ndim: expected 2 or 3, got 1"),
        (LISTS, whole(2, 256)[:, ::2], ".stride(-1): expected 1, got 2"),
        (
            "",
            {LISTS: whole(1, 128).expand(2, 128)},
            "stride of a query token of sparse_indices: expected 128 or more ..., got 0",
        ),
        (MORE, whole(2, 2, 60), ".shape: expected [2, 60] or [2, 1, 60] (...), got [2, 2, 60]"),
        (LENS, ints(1, 2).long(), ".dtype: expected torch.int32 or torch.uint32, got torch.int64"),
        (LENS, ints(1, 2, 3), ".shape: expected [2] or [2, 1] (query tokens), got [3]"),
        (
            LENS,
            ints(1, 2, 3, 4)[::2],
            " must be contiguous: expected no gaps in shape [2], got ...",
        ),
        (MORE_LENS, ints(1), ".shape: expected [2] or [2, 1] (query tokens), got [1]"),
        ("sinks", torch.zeros(15), ".shape: expected [16] (heads of query), got [15]"),
        (
            "sinks",
            torch.zeros(16).double(),
            ".dtype: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.float64",
        ),
        ("sinks", [torch.zeros(16)] * 2, ": expected a list of one tensor, got 2"),
        ("bmm1_scale", "1", ": expected a float or a torch.float32 tensor of one element, got '1'"),
        ("bmm2_scale", torch.ones(2), ".numel(): expected 1, got 2"),
        ("out", bf16(2, 16, 256), ".shape: expected [2, 16, 512], got [2, 16, 256]"),
        ("out", bf16(2, 1, 16, 512), ".shape: expected [2, 16, 512], got [2, 1, 16, 512]"),
        (
            "out",
            bf16(2, 16, 512).half(),
            ".dtype: expected torch.bfloat16, got torch.float16",
        ),
        ("out", bf16(2, 16, 1024)[..., ::2], ".stride(-1): expected 1, got 2"),
        (
            "out",
            bf16(1, 16, 512).expand(2, 16, 512),
            ": expected elements that do not overlap, got ...",
        ),
        ("lse", torch.zeros(2, 15), ".shape: expected [2, 16], got [2, 15]"),
        ("lse", bf16(2, 16), ".dtype: expected torch.float32, got torch.bfloat16"),
        ("return_lse", "yes", ": expected a bool, got 'yes'"),
        ("return_lse_base", "base10", ": expected one of base2, basee, got 'base10'"),
        ("workspace_buffer", None, ": expected a torch.Tensor, got NoneType"),
        ("kv_layout", "NDH", ": expected one of HND, NHD, got 'NDH'"),
        (
            "cum_seq_lens_q",
            ints(0, 1).long(),
            ".dtype: expected torch.int32 or torch.uint32, got ...",
        ),
        ("max_q_len", -1, ": expected an int, 0 or more, got -1"),
        ("enable_pdl", "yes", ": expected a bool, got 'yes'"),
        ("multi_ctas_kv_counter_buffer", 1, ": expected a torch.Tensor, got int"),
        ("backend", "xqa", ": expected one of auto, sparse, got 'xqa'"),
        *(
            ("backend", word, f": not implemented, expected auto or sparse, got {word}")
            for word in ("trtllm-gen", "cute-dsl", "cake")
        ),
        (
            *("kv_cache_format", "fp8_dsv4"),
            ": expected one of fp8, fp8_dsv41, fp8_dsv41_fp4_ca, ..., got 'fp8_dsv4'",
        ),
        ("kv_cache_format", "nvfp4", ": not implemented, expected fp8 or ..., got nvfp4"),
        *(
            (
                name,
                ints(1),
                ": not implemented, expected None (the lengths are swa_topk_lens), got a tensor",
            )
            for name in ("seq_lens", "sparse_topk_lens")
        ),
        *(
            (name, value, ": not implemented, expected None, got ...")
            for name, value in UNSERVED.items()
        ),
        ("hca_is_causal", False, ": not implemented, expected True, got False"),
        ("hca_use_persistent", True, ": not implemented, expected False, got True"),
        ("sparse_topk_lens_offset", 128, ": not implemented, expected 0, got 128"),
    ],
    "two query tokens": [
        (
            LISTS,
            whole(3, 128),
            ".shape: expected [2, 128] or [1, 2, 128] or [2, 1, 128] (...), got [3, 128]",
        ),
        (LENS, ints(1, 2, 3), ".shape: expected [2] or [1, 2] (query tokens), got [3]"),
        ("lse", torch.zeros(1, 16, 2), ".shape: expected [1, 2, 16] or [2, 16], got [1, 16, 2]"),
    ],
    "inline": [
        (SWA, bytes_of(5, 64, 584), ".shape[-1]: expected 528 (...), got 584"),
        (EXTRA, bytes_of(5, 32, 528), ".shape[-1]: expected 288 (...), got 528"),
        (
            "",
            {SWA: bytes_of(5, 64, 528, slot=536)},
            "stride of a token of swa_kv_cache: expected a multiple of 16, 528 ..., got 536",
        ),
        (
            "",
            {EXTRA: bytes_of(5, 32, 288, slot=272)},
            "stride of a token of compressed_kv_cache: expected a multiple of 16, 288 ... got 272",
        ),
        (
            SWA,
            bytes_of(5, 2, 528, stride=1072),
            ".stride(0): expected a multiple of 528 (...), got 1072",
        ),
    ],
    "HND": [
        (
            "",
            {"kv_layout": "NHD"},
            "swa_kv_cache.shape: expected [pages, page_size, 1, 584], got [5, 1, 64, 584]",
        ),
    ],
}


def _call(problem: Dsv4Problem, changes: dict[str, Any]) -> torch.Tensor:
    out = problem.new_out(7.0)
    trtllm_batch_decode_sparse_mla_dsv4(**problem.arguments(out=out) | changes)
    return out


@rejections_of(ROWS)
def test_a_call_is_rejected(call: str, changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value, and nothing is written."""
    problem = CASES[call].build("cpu")
    out, lse = problem.new_out(7.0), torch.full(problem.query.shape[:-1], 7.0)

    with rejects(message):
        given = {"out": out, "lse": lse, "return_lse": True}
        trtllm_batch_decode_sparse_mla_dsv4(**problem.arguments(**given) | changes)

    assert (out == 7.0).all()
    assert (lse == 7.0).all()


CONTENTS: dict[str, list[Row]] = {
    "two pools": [
        (LENS, ints(129, 3), "[0]: expected 0 to 128 (width of sparse_indices), got 129"),
        (MORE_LENS, ints(0, -1), "[1]: expected 0 to 128 (width of extra_sparse_indices), got -1"),
        (LISTS, whole(2, 128) - 2, "[0, 0]: expected -1, or a token of 5 pages of 64, got -2"),
        (MORE, whole(2, 128) + 80, "[0, 0]: expected -1, or a token of 40 pages of 2, got 80"),
    ],
}


class TestContents:
    """Checks with ``MLAGEN_CHECK=1``."""

    @pytest.fixture(autouse=True)
    def checked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Enable the content checks."""
        monkeypatch.setenv("MLAGEN_CHECK", "1")
        current_settings.cache_clear()

    @rejections_of(CONTENTS)
    def test_contents_are_rejected(self, call: str, changes: dict[str, Any], message: str) -> None:
        """Lengths out of range, and entries that are neither -1 nor of a token."""
        problem = CASES[call].build("cpu")
        with rejects(message):
            _call(problem, changes)

    def test_only_what_lengths_reach_is_checked(self) -> None:
        """Entries past a length may be anything, and -1 may be anywhere."""
        problem = case("", seq_lens=(40, 3), entries="-1 in the middle").build("cpu")
        lists = problem.block_tables.clone()
        lists[1, 3:] = 2**31 - 1

        problem.check(_call(problem, {LISTS: lists}))
