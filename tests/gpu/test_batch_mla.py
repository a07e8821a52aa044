"""BatchMLA on a GPU: large batches, pinned metadata, captures and checks."""

from __future__ import annotations

import pytest
import torch

from mlagen.errors import ArgumentError, CaptureError
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from mlagen.settings import current_settings
from tests.problems.batch_mla import SOME, batch_case, plan_arguments, run, run_with_lse, wrapper_of
from tests.problems.mla import MlaCase

LONG = (
    batch_case(((1, 1024), (3, 17), (1, 514)) * 52 + ((2, 97),), page_size=16),
    batch_case(
        ((1, 30_000), *((1, 33),) * 20),
        page_size=64,
        heads=128,
    ),
    batch_case(((17, 197), (7, 75)) * 8, page_size=32, heads=64),
)


@pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])
@pytest.mark.parametrize("case", LONG, ids=str)
def test_large_batches(case: MlaCase, metadata: str | None) -> None:
    """Many sequences, and one long among short ones, are right for any device of the metadata."""
    problem = case.build("cuda")

    out, lse = run_with_lse(wrapper_of(problem, metadata=metadata), problem)

    problem.check(out, lse)


def test_pinned_metadata_may_change_after_a_plan() -> None:
    """A plan reads metadata in pinned memory synchronously."""
    problem = SOME.build("cuda")
    arguments = plan_arguments(problem, metadata="cpu")
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    arguments |= {name: arguments[name].pin_memory() for name in names}
    wrapper = wrapper_of(problem)
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    wrapper.plan(**arguments)
    for name in names:
        arguments[name].fill_(-1)

    out, lse = run_with_lse(wrapper, problem)

    problem.check(out, lse)


def test_a_captured_run_without_buffers_is_rejected() -> None:
    """The next plan would free memory that replays read; capture and wrapper stay usable."""
    problem = SOME.build("cuda")
    wrapper = wrapper_of(problem)
    outputs = {"out": torch.empty_like(problem.query)}
    run(wrapper, problem, **outputs)
    outputs["out"].fill_(7.0)
    graph = torch.cuda.CUDAGraph()

    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="use_cuda_graph: expected True"):
            run(wrapper, problem, **outputs)
        outputs["out"].add_(1.0)

    graph.replay()
    assert (outputs["out"] == 8.0).all()
    problem.check(run(wrapper, problem, **outputs))


def test_metadata_is_checked_with_mlagen_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MLAGEN_CHECK=1 a run rejects contradictory metadata."""
    problem = SOME.build("cuda")
    lens = problem.seq_lens.clone()
    lens[1] = 1000
    wrapper = wrapper_of(problem, kv_len_arr=lens)
    monkeypatch.setenv("MLAGEN_CHECK", "1")
    current_settings.cache_clear()

    with pytest.raises(
        ArgumentError, match=r"kv_len_arr\[1\]: expected 16 \(capacity of its block table"
    ):
        run(wrapper, problem)


def test_a_workspace_that_is_too_small_is_rejected() -> None:
    """The message has both sizes."""
    problem = LONG[1].build("cuda")
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8, device="cuda"))
    wrapper.plan(**plan_arguments(problem, metadata="cpu"))

    with pytest.raises(ArgumentError, match=r"float_workspace_buffer: expected \d+ bytes or more"):
        run(wrapper, problem)
