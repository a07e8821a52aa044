"""Invalid arguments of ``flashinfer.xqa``'s entry points, message by message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mlagen.xqa
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.common.xqa_arguments import flat_lengths, table_capacity
from tests.families.gqa_rejections import E4M3_KV, Rejection, check_xqa, rejections
from tests.families.rejections import displaced
from tests.problems.entry_points import run_xqa, xqa_mla_arguments
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, MlaProblem
from tests.problems.problem import E4M3

HND = GqaCase(name="", seq_lens=(70, 3), layout="HND")


@rejections(
    Rejection(
        "no semaphores",
        lambda _: {"semaphores": None},
        "semaphores: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "semaphores of bytes",
        lambda _: {"semaphores": torch.zeros(8, dtype=torch.uint8)},
        "semaphores.dtype: expected torch.uint32 or torch.int32, got torch.uint8",
    ),
    Rejection(
        "semaphores elsewhere",
        lambda _: {"semaphores": torch.zeros(8, dtype=torch.int32, device="meta")},
        "semaphores.device: expected cpu (of query), got meta",
    ),
    Rejection(
        "no multiprocessors",
        lambda _: {"sm_count": 0},
        "sm_count: expected an int, 1 or more, got 0",
    ),
    Rejection("no query", lambda _: {"q": None}, "q: expected a torch.Tensor, got NoneType"),
    Rejection(
        "other kv heads than the cache",
        lambda _: {"num_kv_heads": 16},
        "num_kv_heads: expected 2 (of k_cache), got 16",
    ),
    Rejection(
        "a fraction of kv heads",
        lambda _: {"num_kv_heads": 2.0},
        "num_kv_heads: expected an int, 1 or more, got 2.0",
    ),
    Rejection(
        "another page size than the cache",
        lambda _: {"page_size": 32},
        "page_size: expected 16 (of k_cache), got 32",
    ),
    Rejection(
        "the axes of the other layout",
        lambda _: {"num_kv_heads": 16, "page_size": 2},
        "num_kv_heads: expected 2 (of k_cache), got 16",
        HND,
    ),
    Rejection(
        "no table",
        lambda _: {"page_table": None},
        "page_table: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "a table of three dimensions",
        lambda p: {"page_table": p.block_tables[:, None]},
        "page_table.ndim: expected 2, got 3",
    ),
    Rejection(
        "an unknown layout",
        lambda _: {"kv_layout": "DHN"},
        "kv_layout: expected one of NHD, HND, got 'DHN'",
    ),
    Rejection(
        "lengths of int64",
        lambda p: {"seq_lens": p.seq_lens[:, None].long()},
        "seq_lens.dtype: expected torch.int32 or torch.uint32, got torch.int64",
        E4M3_KV,
    ),
)
def test_xqa(rejection: Rejection) -> None:
    """Sizes match the caches, and semaphores have FlashInfer's dtype and device."""
    check_xqa(rejection)


def test_sizes_of_any_integer_type() -> None:
    """A size may be any object with ``__index__``, such as a numpy integer."""

    class Two:
        def __index__(self) -> int:
            return 2

    problem = GqaCase(name="", seq_lens=(70, 3)).build("cpu")

    out = run_xqa(problem, num_kv_heads=Two())

    problem.check(out)


MLA = MlaCase(name="", dtype=E4M3, seq_lens=(70, 3), cache_layout="[P,ps,1,d]")
MLA_SEPARATE = MlaCase(
    name="", dtype=E4M3, seq_lens=(70, 3), cache_layout="[P,ps,1,d]", values="other cache"
)

MLA_REJECTIONS: dict[str, tuple[MlaCase, Callable[[MlaProblem], dict[str, Any]], str]] = {
    "two query tokens": (
        MLA,
        lambda p: {"q": p.query.repeat(1, 2, 1, 1)},
        "q.shape[1]: expected 1, got 2",
    ),
    "three dimensions": (MLA, lambda p: {"q": p.query[:, 0]}, "q.ndim: expected 4, got 3"),
    "another width": (
        MLA,
        lambda p: {"q": p.query[..., :512]},
        "q.shape[-1]: expected 576 (kv_lora_rank + qk_rope_head_dim), got 512",
    ),
    "no heads": (
        MLA,
        lambda p: {"q": p.query[:, :, :0]},
        "q.shape[-2]: expected 1 to 256 heads, got 0",
    ),
    "float32": (
        MLA,
        lambda p: {"q": p.query.float(), "k_cache": p.kv_cache.float()},
        "q.dtype: expected torch.bfloat16 or torch.float16 or torch.float8_e4m3fn",
    ),
    "a cache of another dtype": (
        MLA,
        lambda p: {"k_cache": p.kv_cache.to(torch.bfloat16)},
        "k_cache.dtype: expected torch.float8_e4m3fn (that of q, or e4m3), got torch.bfloat16",
    ),
    "a cache of two dimensions": (
        MLA,
        lambda p: {"k_cache": p.kv_cache.flatten(0, 2)},
        "k_cache.ndim: expected 3 or 4, got 2",
    ),
    "no values": (
        MLA,
        lambda _: {"v_cache": None},
        "v_cache: expected a torch.Tensor, got NoneType",
    ),
    "values of another dtype": (
        MLA_SEPARATE,
        lambda p: {"v_cache": p.extra_args["value_cache"].to(torch.bfloat16)},
        "v_cache.dtype: expected torch.float8_e4m3fn (dtype of k_cache), got torch.bfloat16",
    ),
    "values of another shape": (
        MLA_SEPARATE,
        lambda p: {"v_cache": p.extra_args["value_cache"][1:]},
        "v_cache.shape: expected [7, 64, 576] (shape of k_cache), got [6, 64, 576]",
    ),
    "values of other strides": (
        MLA_SEPARATE,
        lambda p: {"v_cache": p.extra_args["value_cache"].repeat(1, 2, 1, 1)[:, :64]},
        "v_cache.stride(): expected (36864, 576, 1) (of k_cache), got (73728, 576, 1)",
    ),
    "values in the memory of the keys, of another dtype": (
        MLA,
        lambda p: {"v_cache": p.kv_cache.view(torch.uint8)},
        "v_cache.dtype: expected torch.float8_e4m3fn (dtype of k_cache), got torch.uint8",
    ),
    "fewer values in the memory of the keys": (
        MLA,
        lambda p: {"v_cache": p.kv_cache[:2]},
        "v_cache.shape[:-1]: expected [7, 64, 1], got [2, 64, 1]",
    ),
    "other strides in the memory of the keys": (
        MLA,
        lambda p: {"v_cache": p.kv_cache.as_strided(p.kv_cache.shape, (64, 576, 576, 1))},
        "v_cache.stride(): expected (36864, 576, 576, 1) (of k_cache), got (64, 576, 576, 1)",
    ),
    "values in the memory of the keys, too narrow": (
        MLA,
        lambda p: {"v_cache": p.kv_cache[..., :511]},
        "v_cache.shape[-1]: expected 512 to 576 (width of k_cache), got 511",
    ),
    "another page size": (
        MLA,
        lambda _: {"page_size": 32},
        "page_size: expected 64 (of k_cache), got 32",
    ),
    "no table": (
        MLA,
        lambda _: {"page_table": None},
        "page_table: expected a torch.Tensor, got NoneType",
    ),
    "a table of another batch": (
        MLA,
        lambda p: {"page_table": p.block_tables[:1]},
        "page_table.shape[0]: expected 2 (batch), got 1",
    ),
    "lengths of two columns": (
        MLA,
        lambda p: {"seq_lens": p.seq_lens[:, None].repeat(1, 2)},
        "seq_lens.ndim: expected 1, got 2",
    ),
    "lengths that are none": (
        MLA,
        lambda _: {"seq_lens": None},
        "seq_lens: expected a torch.Tensor, got NoneType",
    ),
    "no output": (
        MLA,
        lambda _: {"output": None},
        "output: expected a torch.Tensor, got NoneType",
    ),
    "an output as wide as the query": (
        MLA,
        lambda _: {"output": torch.zeros(2, 1, 16, 576, dtype=torch.bfloat16)},
        "output.shape: expected [2, 1, 16, 512] or [2, 16, 512], got [2, 1, 16, 576]",
    ),
    "an output of e4m3": (
        MLA,
        lambda _: {"output": torch.zeros(2, 1, 16, 512).to(E4M3)},
        "output.dtype: expected torch.bfloat16",
    ),
    "text for a scale": (
        MLA,
        lambda _: {"q_scale": "1"},
        "q_scale: expected a float or a torch.float32 tensor of one element, got '1'",
    ),
    "a scale of float64": (
        MLA,
        lambda _: {"kv_scale": torch.ones(1).double()},
        "kv_scale.dtype: expected torch.float32, got torch.float64",
    ),
    "semaphores of bytes": (
        MLA,
        lambda _: {"semaphores": torch.zeros(8, dtype=torch.uint8)},
        "semaphores.dtype: expected torch.uint32 or torch.int32, got torch.uint8",
    ),
    "keys between addresses": (
        MLA,
        lambda p: {"k_cache": displaced(p.kv_cache.view(torch.uint8)).view(E4M3)},
        "k_cache.data_ptr(): expected a multiple of 16, got 1 more than one",
    ),
}


@pytest.mark.parametrize("name", MLA_REJECTIONS)
def test_xqa_mla(name: str) -> None:
    """Messages have the names of ``xqa_mla``, and rejected calls write nothing."""
    case, change, message = MLA_REJECTIONS[name]
    problem = case.build("cpu")
    valid = xqa_mla_arguments(problem)
    valid["output"].fill_(7.0)

    with pytest.raises(ArgumentError) as caught:
        mlagen.xqa.xqa_mla(**valid | change(problem))

    assert str(caught.value).startswith(message)
    assert (valid["output"] == 7.0).all()


def test_xqa_mla_rejects_fp8_ds_mla() -> None:
    """A uint8 cache is rejected here, though another entry point supports it."""
    problem = MLA.build("cpu")
    arguments = xqa_mla_arguments(problem, k_cache=torch.zeros(7, 64, 656, dtype=torch.uint8))

    with pytest.raises((ArgumentError, UnsupportedError), match=r"k_cache\.dtype"):
        mlagen.xqa.xqa_mla(**arguments)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_lengths_are_flattened_without_a_copy(shape: tuple[int, ...]) -> None:
    """The trailing axis of size 1 is dropped as a view."""
    lengths = torch.tensor([3, 4], dtype=torch.int32).view(shape)

    flat = flat_lengths(lengths)

    assert flat.tolist() == [3, 4]
    assert flat.data_ptr() == lengths.data_ptr()


def test_the_capacity_of_a_table() -> None:
    """The capacity is columns times page size, clamped to 32 bits."""
    wide = torch.zeros(1, 1).expand(1, 2**29)

    assert table_capacity(torch.zeros(2, 5), 16) == 80
    assert table_capacity(wide, 16) == 2**31 - 1
