"""Tests of BatchMLA for every device, parametrized by tests/test_batch_mla.py and tests/gpu."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from tests.batch_mla_cases import (
    CASES,
    batch_case,
    plan_arguments,
    run,
    run_with_lse,
    wrapper_of,
)
from tests.cases import MlaCase, MlaProblem

SOME = batch_case("", ((2, 40), (1, 7), (3, 100), (0, 5)), page_size=16, heads=6)
SINGLE = replace(SOME, q_lens=(1, 1, 1, 1))


class BatchMlaSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_output_and_lse_match_float64(self, case: MlaCase) -> None:
        """Output and LSE match float64 with NaN and invalid page ids in all unused memory."""
        problem = case.build(self.device)

        out, lse = run_with_lse(wrapper_of(problem), problem)

        problem.check(out, lse)

    @pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])
    @pytest.mark.parametrize("case", [SOME, SINGLE], ids=["ragged", "one token each"])
    def test_metadata_may_be_on_cpu_or_gpu(self, case: MlaCase, metadata: str | None) -> None:
        """The device of the metadata does not change the result."""
        problem = case.build(self.device)

        out, lse = run_with_lse(wrapper_of(problem, metadata=metadata), problem)

        problem.check(out, lse)

    @pytest.mark.parametrize("backend", ["auto", "fa2", "fa3"])
    def test_backends_give_equal_results(self, backend: str) -> None:
        """Every backend name gives the same result."""
        problem = SOME.build(self.device)

        out, lse = run_with_lse(wrapper_of(problem, backend=backend), problem)

        problem.check(out, lse)

    def test_latent_and_rope_may_be_slices_of_one_tensor(self) -> None:
        """Slices of one query and one cache are read in place."""
        case = replace(SOME, separate_rope=False)
        problem = case.build(self.device)
        query, cache = problem.query, problem.kv_cache

        out, lse = run_with_lse(
            wrapper_of(problem),
            replace(
                problem, extra_args=problem.extra_args | {"query_rope": None, "rope_cache": None}
            ),
            q_nope=query[..., :512],
            q_pe=query[..., 512:],
            ckv_cache=cache[..., :512],
            kpe_cache=cache[..., 512:],
        )

        problem.check(out, lse)

    @pytest.mark.parametrize("case", [SOME, SINGLE], ids=["ragged", "one token each"])
    def test_caller_provided_outputs(self, case: MlaCase) -> None:
        """`out` and `lse` are written in place and returned."""
        problem = case.build(self.device)
        out = torch.full_like(problem.query, math.nan)
        lse = torch.full(problem.query.shape[:2], math.nan, device=self.device)

        result = run_with_lse(
            wrapper_of(problem), problem, out=out, lse=lse, return_lse_base_on_e=True
        )

        assert result[0] is out
        assert result[1] is lse
        problem.check(out, lse, natural=True)

    def test_a_strided_output(self) -> None:
        """A strided `out` gets its elements, and the gaps stay unchanged."""
        problem = SOME.build(self.device)
        tokens, heads, _ = problem.query.shape
        wide = torch.full((tokens, heads + 1, 640), 7.0, dtype=torch.bfloat16, device=self.device)
        out = wide[:, :heads, :512]

        result = run(wrapper_of(problem), problem, out=out)

        assert result is out
        problem.check(out)
        assert (wide[:, heads:] == 7.0).all()
        assert (wide[..., 512:] == 7.0).all()

    def test_an_lse_tensor_is_written_without_return_lse(self) -> None:
        """`lse` without `return_lse` is written, as in FlashInfer."""
        problem = SOME.build(self.device)
        lse = torch.full(problem.query.shape[:2], math.nan, device=self.device)

        out = run(wrapper_of(problem), problem, lse=lse)

        problem.check(out, lse)

    def test_allocated_outputs_are_shaped_like_the_query(self) -> None:
        """Allocated output and LSE have the shapes of the query, however it was planned."""
        shapes = []
        for case in (SOME, SINGLE):
            problem = case.build(self.device)
            out, lse = run_with_lse(wrapper_of(problem), problem)
            shapes.append((tuple(out.shape), tuple(lse.shape)))

        assert shapes == [((6, 6, 512), (6, 6)), ((4, 6, 512), (4, 6))]

    @pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])
    def test_a_plan_copies_the_metadata(self, metadata: str | None) -> None:
        """Changes of the metadata after a plan do not affect its runs."""
        problem = SOME.build(self.device)
        arguments = plan_arguments(problem, metadata=metadata)
        wrapper = wrapper_of(problem)
        wrapper.plan(**arguments)
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
            arguments[name].fill_(-1)

        out, lse = run_with_lse(wrapper, problem)

        problem.check(out, lse)

    def test_a_wrapper_can_replan(self) -> None:
        """A run uses the latest plan."""
        first, second = SOME.build(self.device), CASES[0].build(self.device)
        wrapper = wrapper_of(first)
        run(wrapper, first)
        wrapper.plan(**plan_arguments(second))

        out, lse = run_with_lse(wrapper, second)

        second.check(out, lse)

    def test_extra_query_rows_are_allowed(self) -> None:
        """A query longer than the plan, as in CUDA graphs, gives the planned rows."""
        problem = SINGLE.build(self.device)
        spare = [
            torch.cat([part, part.new_full((3, *part.shape[1:]), math.nan)])
            for part in (problem.query, problem.extra_args["query_rope"])
        ]

        out, lse = run_with_lse(wrapper_of(problem), problem, q_nope=spare[0], q_pe=spare[1])

        assert tuple(out.shape) == (7, 6, 512)
        problem.check(out[:4], lse[:4])

    def test_unsigned_metadata(self) -> None:
        """Metadata may be uint32."""
        problem = SOME.build(self.device)
        arguments = plan_arguments(problem)
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        unsigned = {name: arguments[name].view(torch.uint32) for name in names}

        out, lse = run_with_lse(wrapper_of(problem, **unsigned), problem)

        problem.check(out, lse)

    def test_an_empty_batch(self) -> None:
        """A plan of no sequences gives empty results of the right shapes."""
        problem = SOME.build(self.device)
        none = torch.zeros(1, dtype=torch.int32, device=self.device)
        wrapper = wrapper_of(problem, qo_indptr=none, kv_indptr=none, kv_len_arr=none[:0])
        empty = {"q_nope": problem.query[:0], "q_pe": problem.extra_args["query_rope"][:0]}

        out, lse = run_with_lse(wrapper, problem, **empty)

        assert tuple(out.shape) == (0, 6, 512)
        assert tuple(lse.shape) == (0, 6)

    def test_no_query_tokens(self) -> None:
        """Sequences without query tokens give empty results."""
        problem = SOME.build(self.device)
        starts = torch.zeros(5, dtype=torch.int32, device=self.device)
        empty = {"q_nope": problem.query[:0], "q_pe": problem.extra_args["query_rope"][:0]}

        out, lse = run_with_lse(wrapper_of(problem, qo_indptr=starts), problem, **empty)

        assert tuple(out.shape) == (0, 6, 512)
        assert tuple(lse.shape) == (0, 6)

    @pytest.mark.parametrize("kv_format", ["", "e4m3"], ids=["bf16", "e4m3"])
    def test_a_query_of_zeros_gives_the_mean(self, kv_format: str) -> None:
        """With equal scores the output is the mean of the attended values."""
        case = replace(SOME, kv_format=kv_format, scales="two" if kv_format else "")
        problem = case.build(self.device)
        problem.query.zero_()
        problem.extra_args["query_rope"].zero_()

        out = run(wrapper_of(problem), problem)

        _with_query(problem, latent=0.0, rope=0.0).check(out)

    @pytest.mark.parametrize("scales", ["two", "for 128 elements"])
    def test_scores_of_the_rope_part_only(self, scales: str) -> None:
        """Latent and rope scales of an e4m3 cache apply separately."""
        case = replace(SOME, kv_format="e4m3", scales=scales)
        problem = case.build(self.device)
        problem.query.zero_()
        problem.extra_args["query_rope"].mul_(8.0)

        out, lse = run_with_lse(wrapper_of(problem), problem)

        _with_query(problem, latent=0.0, rope=8.0).check(out, lse)

    def test_unused_scales_are_not_read(self) -> None:
        """NaN in the scales of unused tokens reaches no result."""
        case = replace(SOME, kv_format="e4m3", scales="for 128 elements")
        problem = case.build(self.device)
        scales = problem.extra_args["kv_scales"]

        out, lse = run_with_lse(wrapper_of(problem), problem)

        assert scales.isnan().any()
        problem.check(out, lse)


def _with_query(problem: MlaProblem, *, latent: float, rope: float) -> MlaProblem:
    """Return the problem with the latent and rope parts of its query scaled."""
    rank = problem.case.kv_lora_rank
    factors = torch.full((rank + problem.case.qk_rope_head_dim,), latent, dtype=torch.float64)
    factors[rank:] = rope
    return replace(problem, visible=[replace(s, query=s.query * factors) for s in problem.visible])
