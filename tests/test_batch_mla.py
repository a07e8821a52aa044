"""BatchMLA: plans of every form of metadata, runs as they declare, and runs without a plan."""

from __future__ import annotations

import math
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
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.mla import MlaProblem
from tests.problems.problem import E4M3
from tests.problems.reference import assert_close, output_tolerance

PLANLESS = ENTRY_POINTS["planless"]
CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
# Facts of a problem, what a plan declares, and the arguments of a run.
DECLARED: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "sinks": ({"with_sinks": True}, {"use_sinks": True}, lambda given: {"sinks": given.sinks}),
    "factors": (
        *({"output_scale": 0.5}, {"sm_scale": 7.0, "scale_mode": "bmm-scalar"}),
        lambda given: {"bmm1_scale": given.case.score_scale, "bmm2_scale": 0.5},
    ),
    "an e4m3 query": ({"dtype": E4M3}, {"kv_data_type": E4M3}, lambda _: {}),
}


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


class TestBatchMla:
    """Rules of planned and planless runs, on the device of the fixture."""

    def test_latent_and_rope_may_be_slices_of_one_tensor(self, device: str) -> None:
        """Slices of one query and one cache are read in place."""
        problem = replace(SOME, separate_rope=False).build(device)
        query, cache = problem.query, problem.kv_cache
        slices: dict[str, Any] = {"q_nope": query[..., :512], "q_pe": query[..., 512:]}
        slices |= {"ckv_cache": cache[..., :512], "kpe_cache": cache[..., 512:]}

        problem.check(*wrapper_of(problem).run(**slices, return_lse=True))

    def test_a_strided_output(self, device: str) -> None:
        """A strided `out` gets its elements, and the gaps stay unchanged."""
        problem = SOME.build(device)
        tokens, heads, _ = problem.query.shape
        wide = torch.full((tokens, heads + 1, 640), 7.0, dtype=torch.bfloat16, device=device)
        out = wide[:, :heads, :512]

        assert run(wrapper_of(problem), problem, out=out) is out

        problem.check(out)
        assert (wide[:, heads:] == 7.0).all()
        assert (wide[..., 512:] == 7.0).all()

    def test_extra_query_rows_are_allowed(self, device: str) -> None:
        """A query longer than the plan, as in CUDA graphs, gives the planned rows."""
        problem = SINGLE.build(device)
        spare = [
            torch.cat([part, part.new_full((3, *part.shape[1:]), math.nan)])
            for part in (problem.query, problem.extra_args["query_rope"])
        ]

        out, lse = run_with_lse(wrapper_of(problem), problem, q_nope=spare[0], q_pe=spare[1])

        assert tuple(out.shape) == (7, 6, 512)
        problem.check(out[:4], lse[:4])

    @pytest.mark.parametrize("sequences", [0, 4])
    def test_no_query_tokens(self, sequences: int, device: str) -> None:
        """No sequences, and sequences without query tokens, give empty results."""
        problem = SOME.build(device)
        starts = torch.zeros(sequences + 1, dtype=torch.int32, device=device)
        plan: dict[str, Any] = {"qo_indptr": starts}
        if sequences == 0:
            plan |= {"kv_indptr": starts, "kv_len_arr": starts[:0]}
        empty = {"q_nope": problem.query[:0], "q_pe": problem.extra_args["query_rope"][:0]}

        out, lse = run_with_lse(wrapper_of(problem, **plan), problem, **empty)

        assert (tuple(out.shape), tuple(lse.shape)) == ((0, 6, 512), (0, 6))

    @pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=["e4m3", "e5m2"])
    def test_a_planless_fp8_output(self, dtype: torch.dtype, device: str) -> None:
        """An FP8 `out` holds results divided by `o_scale`, saturated."""
        problem = PLANLESS.build(device, seq_lens=(70, 0, 1, 300))
        out = torch.zeros(4, 16, 512, device=device).to(dtype)
        scale = 0.001 if dtype is E4M3 else 1e-5  # some results exceed the maximum

        assert PLANLESS.run(problem, out=out, o_scale=scale) is out

        expected = problem.expected()
        most = torch.finfo(dtype).max * scale
        wanted = expected.out.clamp(-most, most)
        step = 2.0**-4 if dtype is E4M3 else 2.0**-3
        tolerance = output_tolerance(torch.bfloat16, expected) + wanted.abs() * step + 2e-5
        assert_close(out.double() * scale, wanted, tolerance, "out")

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

    @pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
    def test_a_query_and_a_cache_in_any_form(self, dtype: torch.dtype, device: str) -> None:
        """One tensor, a pair, or both in a pair give the bits of the four parts."""
        problem = replace(SOME, dtype=dtype).build(device)
        wrapper, given = wrapper_of(problem, kv_data_type=dtype), run_arguments(problem)
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

    @pytest.mark.parametrize(("facts", "plan", "given"), DECLARED.values(), ids=DECLARED)
    def test_a_run_as_its_plan_declares(
        self, facts: dict[str, Any], plan: dict[str, Any], given: Any, device: str
    ) -> None:
        """Sinks count in output and LSE, and factors of a run replace the scale of its plan."""
        problem = replace(SOME, **facts).build(device)

        problem.check(*run_with_lse(wrapper_of(problem, **plan), problem, **given(problem)))

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


def test_block_tables_of_a_graph_are_on_the_device() -> None:
    """A captured graph would read a copy of metadata on the CPU, so that it is rejected."""
    _, dense, settings = split_plan(SOME.build("cpu"))
    workspace = torch.empty(0, device="meta")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True)

    with pytest.raises(ArgumentError, match=r"cum_seq_lens_q.device: expected meta, where a capt"):
        wrapper.plan(metadata=MLAPlanMetadata.dense(**dense), **settings)


def test_buffers_of_a_graph_must_be_given() -> None:
    """Graph mode requires all buffers for flat page ids, or none for block tables."""
    with pytest.raises(ArgumentError, match="kv_indptr: expected a torch"):
        BatchMLAPagedAttentionWrapper(torch.empty(0), True, torch.empty(5, dtype=torch.int32))
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True)

    with pytest.raises(ArgumentError, match="qo_indptr: expected a buffer of the constructor"):
        wrapper.plan(**plan_arguments(SOME.build("cpu")))
