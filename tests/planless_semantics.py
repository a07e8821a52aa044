"""Tests of BatchMLA without plans for every device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.batch_mla_cases import WORKSPACE_BYTES, run
from tests.cases import MlaCase, MlaProblem
from tests.mla_rows import E4M3
from tests.reference import assert_close, output_tolerance


class PlanlessSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    def wrapper(self, backend: str = "cutlass") -> BatchMLAPagedAttentionWrapper:
        """Return a wrapper without a plan."""
        size = WORKSPACE_BYTES if self.device == "cuda" else 0
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        return BatchMLAPagedAttentionWrapper(workspace, backend=backend)

    @pytest.mark.parametrize("backend", ["cutlass", "auto"])
    @pytest.mark.parametrize("heads", [5, 128])
    def test_block_tables_need_no_plan(self, heads: int, backend: str) -> None:
        """Lengths and a block table give attention with the scale of DeepSeek's heads."""
        problem = self._problem(heads=heads)

        out = run(self.wrapper(backend), problem, **_tables(problem))

        assert tuple(out.shape) == (4, heads, 512)
        problem.check(out)

    def test_a_caller_provided_output(self) -> None:
        """`out` is written in place and returned."""
        problem = self._problem()
        out = torch.full((4, 16, 512), math.nan, dtype=torch.bfloat16, device=self.device)

        result = run(self.wrapper(), problem, out=out, **_tables(problem))

        assert result is out
        problem.check(out)

    @pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=["e4m3", "e5m2"])
    def test_an_fp8_output(self, dtype: torch.dtype) -> None:
        """An FP8 `out` holds results divided by `o_scale`, saturated."""
        problem = self._problem()
        out = torch.zeros(4, 16, 512, device=self.device).to(dtype)
        scale = 0.001 if dtype is E4M3 else 1e-5  # some results exceed the maximum

        result = run(self.wrapper(), problem, out=out, o_scale=scale, **_tables(problem))

        assert result is out
        expected = problem.expected()
        most = torch.finfo(dtype).max * scale
        wanted = expected.out.clamp(-most, most)
        step = 2.0**-4 if dtype is E4M3 else 2.0**-3
        tolerance = output_tolerance(torch.bfloat16, expected) + wanted.abs() * step + 2e-5
        assert_close(out.double() * scale, wanted, tolerance, "out")

    def _problem(self, heads: int = 16) -> MlaProblem:
        case = MlaCase(name="", seq_lens=(70, 0, 1, 300), heads=heads, separate_rope=True)
        problem = case.build(self.device)
        rope = problem.extra_args["query_rope"]
        extra_args = problem.extra_args | {"query_rope": rope[:, 0]}
        return replace(problem, query=problem.query[:, 0], extra_args=extra_args)


def _tables(problem: MlaProblem) -> dict[str, torch.Tensor]:
    return {"kv_len": problem.seq_lens, "page_table": problem.block_tables}
