"""BatchMLA: rules of the wrapper, with a plan and without one, and what it rejects."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError, CaptureError, UnsupportedError
from mlagen.mla import wrapper as batch_wrapper
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.problems.batch_mla import (
    SINGLE,
    SOME,
    new_wrapper,
    plan_arguments,
    run,
    run_with_lse,
    wrapper_of,
)
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.mla import MlaCase
from tests.problems.mla_cases import BATCH_CASES
from tests.problems.problem import E4M3, ints
from tests.problems.reference import assert_close, output_tolerance

BACKENDS = (
    *("fa2", "fa3", "cutlass", "cutile", "trtllm-gen", "xqa"),
    *("cute-dsl", "cute-dsl-modular", "cute-dsl-monolithic"),
)
PLANLESS = ENTRY_POINTS["planless"]
METADATA = pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])


class TestBatchMla:
    """Rules of planned and planless runs, on the device of the fixture."""

    @METADATA
    @pytest.mark.parametrize("case", [SOME, SINGLE], ids=["ragged", "one token each"])
    def test_metadata_may_be_on_cpu_or_gpu(
        self, case: MlaCase, metadata: str | None, device: str
    ) -> None:
        """The device of the metadata does not change the result."""
        problem = case.build(device)

        problem.check(*run_with_lse(wrapper_of(problem, metadata=metadata), problem))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_backends_give_equal_results(self, backend: str, device: str) -> None:
        """Every backend name gives the same result."""
        problem = SOME.build(device)

        problem.check(*run_with_lse(wrapper_of(problem, backend=backend), problem))

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

    def test_an_lse_tensor_is_written_without_return_lse(self, device: str) -> None:
        """`lse` without `return_lse` is written, as in FlashInfer."""
        problem = SOME.build(device)
        lse = torch.full(problem.query.shape[:2], math.nan, device=device)

        problem.check(run(wrapper_of(problem), problem, lse=lse), lse)

    @METADATA
    def test_a_plan_copies_the_metadata(self, metadata: str | None, device: str) -> None:
        """Changes of the metadata after a plan do not affect its runs."""
        problem = SOME.build(device)
        arguments = plan_arguments(problem, metadata=metadata)
        wrapper = wrapper_of(problem)
        wrapper.plan(**arguments)
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
            arguments[name].fill_(-1)

        problem.check(*run_with_lse(wrapper, problem))

    def test_a_wrapper_can_replan(self, device: str) -> None:
        """A run uses the latest plan."""
        first, second = SOME.build(device), BATCH_CASES[0].build(device)
        wrapper = wrapper_of(first)
        run(wrapper, first)
        wrapper.plan(**plan_arguments(second))

        second.check(*run_with_lse(wrapper, second))

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


DIMS = "(kv_lora_rank, qk_rope_head_dim)"
MLA_DTYPES = (
    "MLA kv_data_type: expected torch.bfloat16 or torch.float16 or torch.float8_e4m3fn, got [1]"
)
E4M3_DIMS = "head_dim_ckv=512 and head_dim_kpe in (0, 64)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_data_type": torch.float32}, "MLA kv_data_type"),
        ({"kv_data_type": [1]}, MLA_DTYPES),
        ({"q_data_type": [1]}, "q_data_type: expected torch.bfloat16 (kv_data_type), got [1]"),
        ({"head_dim_kpe": -1}, "head_dim_kpe must be >= 0"),
        ({"kv_data_type": E4M3, "q_data_type": torch.float16}, "q_data_type=torch.bfloat16"),
        ({"kv_data_type": E4M3, "head_dim_ckv": 256}, E4M3_DIMS),
        ({"kv_data_type": E4M3, "head_dim_kpe": 32}, E4M3_DIMS),
        ({"q_data_type": torch.float16}, "q_data_type: expected torch.bfloat16 (kv_data_type)"),
        (
            {"head_dim_ckv": 128},
            f"no MLA decode kernel for query bf16, cache bf16, {DIMS} (128, 64), ",
        ),
        ({"use_profiler": True}, "Profiler is enabled"),
        ({"num_heads": 0}, "num_heads: expected an int, 1 or more, got 0"),
        ({"num_heads": 257}, "num_heads: expected 256 or less, got 257"),
        ({"page_size": 0}, "page_size: expected an int, 1 or more, got 0"),
        ({"sm_scale": "1"}, "sm_scale: expected a float, got '1'"),
        ({"kv_indices": [1]}, "kv_indices: expected a torch.Tensor, got list"),
        ({"kv_len_arr": torch.zeros(4)}, "kv_len_arr.dtype: expected torch.int32 or torch.uint32"),
        ({"kv_len_arr": ints(1)[None]}, "kv_len_arr.ndim: expected 1, got 2"),
        ({"kv_len_arr": ints(1, 2, 3, 4, 5)}, "qo_indptr.shape: expected [6] or longer (batch"),
        ({"kv_indptr": ints(0, 1)}, "kv_indptr.shape: expected [5] or longer (batch of kv_len"),
        ({"qo_indptr": ints(0, 2, 1, 6, 6)}, "qo_indptr[2]: expected 2 or more"),
        ({"qo_indptr": ints(1, 2, 3, 6, 6)}, "qo_indptr[0]: expected 0, got 1"),
        ({"kv_indptr": ints(0, 3, 2, 11, 12)}, "kv_indptr[2]: expected 3 or more"),
        ({"kv_indptr": ints(0, 3, 4, 11, 99)}, "kv_indptr[-1]: expected 20 (page ids)"),
        ({"kv_len_arr": ints(40, -7, 100, 5)}, "kv_len_arr[1]: expected 0 or more, got -7"),
        ({"kv_len_arr": ints(49, 7, 100, 5)}, "kv_len_arr[0]: expected 48 (capacity of its block"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_a_plan_that_breaks_a_rule_is_rejected(changes: dict[str, Any], message: str) -> None:
    """The error names the broken rule, and the previous plan remains."""
    problem = SOME.build("cpu")
    wrapper = wrapper_of(problem)
    is_unsupported = "no MLA decode kernel" in message or "Profiler" in message
    error = UnsupportedError if is_unsupported else ArgumentError

    with pytest.raises(error, match=re.escape(message)):
        wrapper.plan(**plan_arguments(problem, **changes))

    problem.check(run(wrapper, problem))


def test_a_run_without_a_plan_is_rejected() -> None:
    """Without a plan, and without lengths and a table, the error names the call to make."""
    problem = SOME.build("cpu")
    wrapper = new_wrapper("cpu")

    with pytest.raises(ArgumentError, match=r"expected plan\(\) to be called first"):
        run(wrapper, problem, kv_len=problem.seq_lens)


def test_an_unknown_backend_is_rejected() -> None:
    """A name that FlashInfer does not have is rejected at once."""
    with pytest.raises(ArgumentError, match="backend: expected one of auto, fa2, fa3, cutlass"):
        wrapper_of(SOME.build("cpu"), backend="fa4")


def with_buffers(page_ids: int) -> tuple[BatchMLAPagedAttentionWrapper, dict[str, torch.Tensor]]:
    """Return a wrapper for graphs of four requests, and its buffers."""
    sizes = {"qo_indptr": 5, "kv_indptr": 5, "kv_indices": page_ids, "kv_len_arr": 4}
    buffers = {name: torch.full((size,), -1, dtype=torch.int32) for name, size in sizes.items()}
    given: dict[str, Any] = dict(buffers)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True, **given)
    return wrapper, buffers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_len_arr": ints(1, 2, 3)}, r"kv_len_arr.shape: expected \[4\] \(its buffer"),
        ({"kv_indices": ints(*range(30))}, r"kv_indices.shape\[0\]: expected 25 \(its buffer\)"),
    ],
    ids=["another batch", "too many pages"],
)
def test_a_plan_that_its_buffers_cannot_hold_is_rejected(
    changes: dict[str, Any], message: str
) -> None:
    """Graph buffers fix the batch size, and the page ids must fit."""
    problem = SOME.build("cpu")
    wrapper, buffers = with_buffers(page_ids=25)
    if "kv_len_arr" in changes:
        changes = {**changes, "qo_indptr": ints(0, 2, 3, 6), "kv_indptr": ints(0, 3, 4, 11)}

    with pytest.raises(ArgumentError, match=message):
        wrapper.plan(**plan_arguments(problem, **changes))

    assert all((buffer == -1).all() for buffer in buffers.values())


def test_plans_are_copied_into_the_buffers_of_a_graph() -> None:
    """With buffers a run reads the plan from them, the page ids from their start."""
    problem = SOME.build("cpu")
    wrapper, buffers = with_buffers(page_ids=40)

    wrapper.plan(**plan_arguments(problem))

    problem.check(run(wrapper, problem))
    assert torch.equal(buffers["kv_len_arr"], problem.seq_lens)
    assert (buffers["kv_indices"][len(problem.block_tables) :] == -1).all()


def test_a_run_is_captured_from_buffers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture rejects metadata that the next plan frees."""
    monkeypatch.setattr(batch_wrapper, "is_capturing", lambda _: True)
    problem = SOME.build("cpu")
    out = torch.full_like(problem.query, 7.0)

    with pytest.raises(CaptureError, match="use_cuda_graph: expected True with its four buffers"):
        run(wrapper_of(problem), problem, out=out)
    tables = {"kv_len": problem.seq_lens, "page_table": problem.seq_lens[:, None]}
    with pytest.raises(CaptureError, match="use_cuda_graph: expected True with its four buffers"):
        run(wrapper_of(problem), problem, out=out, **tables)

    assert (out == 7.0).all()
    wrapper, _ = with_buffers(page_ids=40)
    wrapper.plan(**plan_arguments(problem))
    problem.check(run(wrapper, problem, out=out))


def test_buffers_of_a_graph_must_be_given() -> None:
    """Graph mode requires all buffers for flat page ids, or none for block tables."""
    with pytest.raises(ArgumentError, match="kv_indptr: expected a torch"):
        BatchMLAPagedAttentionWrapper(torch.empty(0), True, torch.empty(5, dtype=torch.int32))
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True)

    with pytest.raises(ArgumentError, match="qo_indptr: expected a buffer of the constructor"):
        wrapper.plan(**plan_arguments(SOME.build("cpu")))
