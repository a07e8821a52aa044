"""BatchMLA plans of both forms of metadata, and runs as their plans declare them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from tests.problems.batch_mla import (
    SINGLE,
    SOME,
    new_wrapper,
    plan_arguments,
    run,
    run_arguments,
    run_with_lse,
    wrapper_of,
)
from tests.problems.mla import MlaProblem
from tests.problems.problem import E4M3
from tests.problems.reference import assert_close, output_tolerance

CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


def split_plan(
    problem: MlaProblem, metadata: str | None = None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the metadata of a plan in the CSR form and in the dense form, and its settings."""
    settings = plan_arguments(problem, metadata=metadata)
    csr = {name: settings.pop(name) for name in CSR}
    indptr, device = csr["kv_indptr"].tolist(), csr["kv_indptr"].device
    pages = [end - first for first, end in pairwise(indptr)]
    tables = torch.full((len(pages), max(pages) + 2), -1, dtype=torch.int32, device=device)
    for table, first, count in zip(tables, indptr, pages, strict=False):
        table[:count] = csr["kv_indices"][first : first + count]
    dense = {
        "cum_seq_lens_q": csr["qo_indptr"],
        "block_tables": tables,
        "seq_lens": csr["kv_len_arr"],
    }
    return csr, dense, settings


def packed_arguments(problem: MlaProblem) -> dict[str, Any]:
    """Return query and cache of a run, each in one tensor."""
    given = run_arguments(problem)
    pairs = {"query": ("q_nope", "q_pe"), "kv_cache": ("ckv_cache", "kpe_cache")}
    return {
        name: torch.cat([given[part].float() for part in parts], -1).to(given[parts[0]].dtype)
        for name, parts in pairs.items()
    }


class TestBatchMlaPlans:
    """Plans of FlashInfer's metadata objects and their runs, on the device of the fixture."""

    @pytest.mark.parametrize("form", ["csr", "dense", "dual", "dense by name"])
    @pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])
    def test_every_form_of_metadata_plans_the_same_requests(
        self, form: str, metadata: str | None, device: str
    ) -> None:
        """Flat page ids, block tables, and both give the result of the problem."""
        for case in (SOME, SINGLE):
            problem = case.build(device)
            csr, dense, settings = split_plan(problem, metadata)
            plans: dict[str, dict[str, Any]] = {
                "csr": {"metadata": MLAPlanMetadata.csr(**csr)},
                "dense": {"metadata": MLAPlanMetadata.dense(**dense, max_q_len=9)},
                "dual": {"metadata": MLAPlanMetadata.dual(**csr, **dense)},
                "dense by name": dense,
            }
            wrapper = new_wrapper(device)
            wrapper.plan(**plans[form], **settings, lse_mode="base2")

            problem.check(*run_with_lse(wrapper, problem))

    def test_a_query_and_a_cache_in_any_form(self, device: str) -> None:
        """One tensor, a pair, or both in a pair give the bits of the four parts."""
        problem = SOME.build(device)
        wrapper, given = wrapper_of(problem), run_arguments(problem)
        pairs: dict[str, Any] = {
            "query": (given["q_nope"], given["q_pe"]),
            "kv_cache": (given["ckv_cache"], given["kpe_cache"]),
        }
        whole, expected = packed_arguments(problem), run(wrapper, problem)
        both = {
            "query": (whole["query"], pairs["query"]),
            "kv_cache": (pairs["kv_cache"], whole["kv_cache"]),
        }

        for forms in (pairs, whole, pairs | {"query": whole["query"]}, both):
            for _ in range(2):
                out: Any = wrapper.run(**forms)
                assert torch.equal(out, expected)

    def test_sinks(self, device: str) -> None:
        """Sinks of a run count in output and LSE."""
        problem = replace(SOME, with_sinks=True).build(device)
        wrapper = wrapper_of(problem, use_sinks=True)

        problem.check(*run_with_lse(wrapper, problem, sinks=problem.sinks))

    def test_factors_of_a_run_replace_the_scale_of_the_plan(self, device: str) -> None:
        """`bmm1_scale` is the whole factor of the scores, and `bmm2_scale` that of the output."""
        problem = replace(SOME, output_scale=0.5).build(device)
        wrapper = wrapper_of(problem, sm_scale=7.0, scale_mode="bmm-scalar")
        factors = {"bmm1_scale": problem.case.score_scale, "bmm2_scale": 0.5}

        problem.check(*run_with_lse(wrapper, problem, **factors))

    def test_a_threshold_changes_nothing(self, device: str) -> None:
        """With `skip_softmax` a run has a threshold, and the bits of a run without."""
        problem = SOME.build(device)
        wrapper = wrapper_of(problem, skip_softmax=True)

        out = run(wrapper, problem, skip_softmax_threshold_scale_factor=0.5)

        assert torch.equal(out, run(wrapper_of(problem), problem))

    def test_an_e4m3_query(self, device: str) -> None:
        """An e4m3 query over an e4m3 cache gives a bf16 output, in one tensor and in parts."""
        problem = replace(SOME, dtype=E4M3).build(device)
        wrapper = wrapper_of(problem, kv_data_type=E4M3)

        problem.check(*run_with_lse(wrapper, problem))
        whole = packed_arguments(problem)
        out: Any = wrapper.run(**whole)
        assert torch.equal(out, run(wrapper, problem))

    def test_a_planned_fp8_output(self, device: str) -> None:
        """A run writes its results, divided by `o_scale`, to an e4m3 `out`."""
        problem = SOME.build(device)
        wrapper = wrapper_of(problem, output_scale="per-tensor", output_dtype=E4M3)
        out = torch.zeros(problem.out_shape, device=device).to(E4M3)

        assert run(wrapper, problem, out=out, o_scale=0.01) is out

        expected = problem.expected()
        tolerance = output_tolerance(torch.bfloat16, expected) + expected.out.abs() * 2.0**-4 + 2e-4
        assert_close(out.double() * 0.01, expected.out, tolerance, "out")

    def test_block_tables_of_a_run(self, device: str) -> None:
        """`kv_len` and `page_table` of a run replace those of its plan."""
        problem = SOME.build(device)
        _, dense, _ = split_plan(problem)
        wrapper = wrapper_of(problem, kv_len_arr=torch.zeros_like(problem.seq_lens))

        tables = {"kv_len": dense["seq_lens"], "page_table": dense["block_tables"]}
        problem.check(*run_with_lse(wrapper, problem, **tables))

    def test_block_tables_of_a_graph_are_read_in_place(self, device: str) -> None:
        """A graph wrapper without buffers reads block tables, lengths and offsets of its caller."""
        problem = SOME.build(device)
        _, dense, settings = split_plan(problem)
        tables = dense["block_tables"].clone()
        dense["block_tables"].zero_()
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True)
        for _ in range(2):
            wrapper.plan(metadata=MLAPlanMetadata.dense(**dense), **settings)
        dense["block_tables"].copy_(tables)

        problem.check(run(wrapper, problem))

        other = MLAPlanMetadata.dense(**{**dense, "seq_lens": dense["seq_lens"].clone()})
        with pytest.raises(ArgumentError, match="seq_lens: expected the tensor of the plan before"):
            wrapper.plan(metadata=other, **settings)
