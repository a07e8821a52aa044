"""Runs that BatchMLA rejects, with a plan and without one."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, UnsupportedError
from tests.problems.batch_mla import SINGLE, SOME, new_wrapper, run, run_arguments, wrapper_of
from tests.problems.mla import KINDS, MlaProblem
from tests.problems.problem import E4M3, bf16

FP8 = replace(SOME, **KINDS["bf16 over e4m3 with two scales"])


def rejects(problem: MlaProblem, message: str, **changes: object) -> None:
    """Assert that a run is rejected with a matching message, and writes nothing."""
    wrapper = wrapper_of(problem)
    shape = tuple(problem.query.shape)
    out = torch.full(shape, 7.0, dtype=torch.bfloat16, device=problem.query.device)

    with pytest.raises(ArgumentError, match=message):
        run(wrapper, problem, **{"out": out} | changes)

    assert (out == 7.0).all()


SHAPE = (6, 6, 512)
FP8_OUT = torch.zeros(4, 6, 512).to(E4M3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"o_scale": 1.0}, "o_scale is only supported with the cutlass backend"),
        ({"q_nope": torch.zeros(SHAPE)}, "q_nope.dtype: expected torch.bfloat16"),
        ({"q_pe": torch.zeros(6, 6, 64)}, "q_pe.dtype: expected torch.bfloat16"),
        ({"ckv_cache": torch.zeros(9, 16, 512)}, "ckv_cache.dtype: expected torch.bfloat16"),
        ({"kpe_cache": torch.zeros(9, 16, 64)}, "kpe_cache.dtype: expected torch.bfloat16"),
        ({"q_nope": bf16(6, 7, 512)}, "q_nope.shape[1]: expected 6 (num_heads of plan), got 7"),
        (
            {"ckv_cache": bf16(9, 32, 512)},
            "ckv_cache.shape[1]: expected 16 (page_size of plan), got 32",
        ),
        ({"q_nope": bf16(5, 6, 512)}, "q_nope.shape[0]: expected 6 (qo_indptr[-1]) or more, got 5"),
        ({"q_pe": bf16(6, 6, 32)}, "q_pe.shape[2]: expected 64 (head_dim_kpe of plan), got 32"),
        ({"q_pe": bf16(5, 6, 64)}, "q_pe.shape: expected [6, 6, 64], got [5, 6, 64]"),
        ({"out": torch.zeros(6, 6, 256)}, "Invalid shape of out: expected [6, 6, 512]"),
        ({"out": torch.zeros(SHAPE)}, "Invalid dtype of out: expected torch.bfloat16"),
        ({"lse": torch.zeros(6, 5)}, "Invalid shape of lse: expected [6, 6]"),
        ({"lse": torch.zeros(6, 6).half()}, "Invalid dtype of lse: expected torch.float32"),
        ({"lse": torch.zeros(6, 6, device="meta")}, "Invalid device of lse: expected cpu"),
        ({"ckv_scale": 1.0}, "only valid when"),
        ({"kpe_scale": 1.0}, "only valid when"),
        ({"ckv_scale_arr": torch.zeros(1)}, "only valid when"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_run_that_is_not_as_planned_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The error names the difference from the plan, and nothing is written."""
    rejects(SOME.build("cpu"), re.escape(message), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ckv_scale": None}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"ckv_scale_arr": torch.ones(1)}, "Exactly one of ckv_scale or ckv_scale_arr"),
        ({"kpe_scale": None}, "kpe_scale is required"),
        *(
            ({name: value}, f"{name} must be a finite positive value")
            for name in ("ckv_scale", "kpe_scale")
            for value in (0.0, -1.0, math.inf, math.nan, True, "1", torch.ones(1))
        ),
        *(
            ({name: value}, f"{name} must be .* a number that float32 can hold, got {shown}")
            for name in ("ckv_scale", "kpe_scale")
            for value, shown in ((10**400, "an int of 1329 bits"), (1e39, r"1e\+39"))
        ),
        *(
            ({"ckv_scale": None, "ckv_scale_arr": array}, message)
            for array, message in (
                (torch.ones(16, 4), "Invalid shape of ckv_scale_arr"),
                (torch.ones(16, 16, 4).half(), "Invalid dtype of ckv_scale_arr"),
                (torch.ones(16, 16, 8)[..., ::2], "ckv_scale_arr must be contiguous"),
            )
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) and len(value) == 1 else "",
)
def test_scales_that_an_e4m3_cache_cannot_have_are_rejected(
    changes: dict[str, Any], message: str
) -> None:
    """The error names the missing or invalid scale, and nothing is written."""
    rejects(FP8.build("cpu"), message, **changes)


def test_an_unplanned_rope_cache_is_rejected() -> None:
    """Without rope dims, the rope cache and the rope query have width 0."""
    problem = replace(SOME, qk_rope_head_dim=0).build("cpu")
    wide = problem.kv_cache.new_zeros(*problem.kv_cache.shape[:2], 64)

    rejects(problem, r"kpe_cache.shape\[2\]: expected 0 \(head_dim_kpe of plan\)", kpe_cache=wide)


def test_the_int_1_requests_an_lse() -> None:
    """The ints 0 and 1 are accepted as bools."""
    problem = SOME.build("cpu")

    result = wrapper_of(problem).run(**run_arguments(problem, return_lse=1))

    assert isinstance(result, tuple)
    problem.check(*result)


def test_a_profiler_is_rejected() -> None:
    """A profiler buffer is an error: nothing would write it."""
    problem = SOME.build("cpu")

    with pytest.raises(UnsupportedError, match="profiler_buffer: not implemented"):
        run(wrapper_of(problem), problem, profiler_buffer=torch.zeros(1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"return_lse": True}, "return_lse does not support cutlass"),
        ({"lse": torch.zeros(4, 6)}, "lse does not support cutlass"),
        ({"profiler_buffer": torch.zeros(1)}, "profiler_buffer does not support"),
        ({"ckv_scale": 1.0}, "ckv_scale does not support cutlass"),
        ({"ckv_scale_arr": torch.ones(1)}, "ckv_scale_arr does not support cutlass"),
        ({"kpe_scale": 1.0}, "kpe_scale does not support cutlass"),
        ({"o_scale": 1.0}, "out tensor must be provided when o_scale"),
        ({"o_scale": 1.0, "out": bf16(4, 6, 512)}, "out must be an FP8 tensor"),
        ({"o_scale": 0.0, "out": FP8_OUT}, "o_scale must be a finite positive value"),
        ({"o_scale": 1.0, "out": torch.zeros(4, 6, 256).to(E4M3)}, "Invalid shape of out"),
        (
            {"o_scale": 10**400, "out": FP8_OUT},
            "o_scale must be .* float32 can hold, got an int of 1329 bits",
        ),
        ({"kpe_cache": None}, "kpe_cache: expected a torch.Tensor, got NoneType"),
        ({"kv_len": None}, "kv_len: expected a torch.Tensor, got NoneType"),
        ({"page_table": torch.zeros(4, dtype=torch.int32)}, "page_table.ndim: expected 2, got 1"),
        ({"kv_len": torch.zeros(4)}, "kv_len.dtype: expected torch.int32 or torch.uint32"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_planless_runs_reject(changes: dict[str, Any], message: str) -> None:
    """The error names the unsupported argument."""
    problem = SINGLE.build("cpu")
    wrapper = new_wrapper("cpu", "cutlass")
    tables = {"kv_len": problem.seq_lens, "page_table": torch.zeros(4, 7, dtype=torch.int32)}

    with pytest.raises(ArgumentError, match=message):
        wrapper.run(**run_arguments(problem, **tables | changes))
