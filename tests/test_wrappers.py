"""Rules that the wrappers of planned MLA and of planned batch decode share, for every device."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import mlagen.gqa.wrapper
import mlagen.mla.wrapper
from mlagen.errors import CaptureError
from tests.problems import batch_decode, batch_mla
from tests.problems.gqa import GqaCase
from tests.problems.mla_cases import BATCH_CASES

GQA_CASE = GqaCase(seq_lens=(70, 3, 0, 33), sink=3.0)


class Wrapper(NamedTuple):
    """A wrapper's module and class, how it is called, a case, and one of another plan."""

    module: ModuleType
    kind: Any
    calls: Any
    case: Any
    other: Any

    def for_graphs(self, problem: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """Return a wrapper for CUDA graphs, and its buffers."""
        buffers = self.calls.graph_buffers(problem)
        return self.kind(torch.empty(0), use_cuda_graph=True, **buffers), buffers


WRAPPERS = {
    "MLA": Wrapper(
        *(mlagen.mla.wrapper, mlagen.mla.BatchMLAPagedAttentionWrapper),
        *(batch_mla, batch_mla.SOME, BATCH_CASES[0]),
    ),
    "batch decode": Wrapper(
        *(mlagen.gqa.wrapper, mlagen.decode.BatchDecodeWithPagedKVCacheWrapper),
        *(batch_decode, GQA_CASE, replace(GQA_CASE, seq_lens=(5, 90), seed=1)),
    ),
}
wrappers = pytest.mark.parametrize("of", WRAPPERS.values(), ids=WRAPPERS)
BACKENDS = {
    "MLA": "auto autotune fa2 fa3 cutlass cutile trtllm-gen xqa cute-dsl cute-dsl-modular "
    "cute-dsl-monolithic cute-dsl-rubin-mtp",
    "batch decode": "auto fa2 fa3 trtllm-gen cute-dsl cudnn",
}
NAMED = [(name, backend) for name, names in BACKENDS.items() for backend in names.split()]


class TestWrappers:
    """Rules of plans and runs, on the device of the fixture."""

    @pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "on the device"])
    @wrappers
    def test_a_plan_copies_the_metadata(
        self, of: Wrapper, metadata: str | None, device: str
    ) -> None:
        """Changes of the metadata after a plan do not affect its runs."""
        problem = of.case.build(device)
        given = of.calls.plan_arguments(problem, metadata=metadata)
        wrapper = of.calls.wrapper_of(problem)
        wrapper.plan(**given)
        for tensor in given.values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(-1)

        problem.check(of.calls.run(wrapper, problem))

    @wrappers
    def test_a_wrapper_can_replan(self, of: Wrapper, device: str) -> None:
        """A run computes the requests of the latest plan."""
        first, second = of.case.build(device), of.other.build(device)
        wrapper = of.calls.wrapper_of(first)
        first.check(of.calls.run(wrapper, first))

        wrapper.plan(**of.calls.plan_arguments(second))

        second.check(of.calls.run(wrapper, second))

    @pytest.mark.parametrize(("name", "backend"), NAMED)
    def test_backends_are_names_of_one_semantics(
        self, name: str, backend: str, device: str
    ) -> None:
        """Every backend gives the same bits, also with a threshold that skips the softmax."""
        of = WRAPPERS[name]
        problem = of.case.build(device)
        usual = of.calls.wrapper_of(problem)
        wrapper = of.kind(usual._workspace.clone(), backend=backend)
        declared = {"skip_softmax": True, "lse_mode": "base2"} if name == "MLA" else {}
        given = of.calls.run_arguments(problem, return_lse=True)
        expected = usual.run(**given)

        wrapper.plan(**of.calls.plan_arguments(problem))
        assert all(map(torch.equal, wrapper.run(**given), expected))

        wrapper.plan(**of.calls.plan_arguments(problem, **declared))
        made = wrapper.run(**given, skip_softmax_threshold_scale_factor=0.5)
        assert all(map(torch.equal, made, expected))

    @pytest.mark.parametrize("return_lse", [0, 1, True])
    @wrappers
    def test_given_outputs(self, of: Wrapper, return_lse: int, device: str) -> None:
        """`out` and `lse` are written and returned; an `lse` that is not asked for is written."""
        problem = of.case.build(device)
        wrapper, out = of.calls.wrapper_of(problem), problem.new_out()
        lse = torch.full(problem.query.shape[:2], math.nan, device=device)
        given = of.calls.run_arguments(problem, out=out, lse=lse, return_lse=return_lse)

        result = wrapper.run(**given)

        made = result if return_lse else (result,)
        assert all(part is own for part, own in zip(made, (out, lse), strict=False))
        problem.check(out, lse)


@wrappers
def test_plans_are_copied_into_the_buffers_of_a_graph(of: Wrapper) -> None:
    """A plan writes all buffers from their start, and runs read the page ids there."""
    problem = of.case.build("cpu")
    wrapper, buffers = of.for_graphs(problem)
    given = of.calls.plan_arguments(problem)

    wrapper.plan(**given)

    problem.check(of.calls.run(wrapper, problem))
    for name, tensor in given.items():
        if isinstance(tensor, torch.Tensor):
            (buffer,) = (buffer for own, buffer in buffers.items() if name in own)
            assert torch.equal(buffer[: len(tensor)], tensor)
            assert (buffer[len(tensor) :] == -1).all()


@wrappers
def test_a_run_is_captured_from_buffers_alone(of: Wrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture rejects metadata that the next plan frees."""
    problem = of.case.build("cpu")
    planned, out = of.calls.wrapper_of(problem), problem.new_out(7.0)
    wrapper, _ = of.for_graphs(problem)
    wrapper.plan(**of.calls.plan_arguments(problem))
    monkeypatch.setattr(of.module, "is_capturing", lambda _: True)
    runs: list[dict[str, Any]] = [{}]
    if of.calls is batch_mla:
        runs += [{"kv_len": problem.seq_lens, "page_table": problem.seq_lens[:, None]}]

    for changes in runs:
        with pytest.raises(
            CaptureError, match=r"use_cuda_graph: expected True with its .* buffers"
        ):
            of.calls.run(planned, problem, out=out, **changes)

    assert (out == 7.0).all()
    problem.check(of.calls.run(wrapper, problem, out=out))
