"""Runs of the wrapper as calls of one function, for the tests of entry points."""

from __future__ import annotations

from typing import Any

import torch

import mlagen.mla
from tests.problems.batch_mla import batch_case, plan_arguments, run_arguments

PLANNED_CASE = batch_case(((1, 70), (1, 3)), page_size=64, heads=16)


def run_wrapper(**arguments: Any) -> object:
    """Run a wrapper that is one of the arguments."""
    return arguments.pop("wrapper").run(**arguments)


def planned(**changes: Any) -> dict[str, Any]:
    """Return the arguments of :func:`run_wrapper`, with some arguments of the plan changed."""
    problem = PLANNED_CASE.build("cpu")
    wrapper = mlagen.mla.BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20))
    wrapper.plan(**plan_arguments(problem, **changes))
    out = torch.zeros(2, 16, 512, dtype=torch.bfloat16)
    return run_arguments(problem, out=out, wrapper=wrapper)


def planned_packed(**changes: Any) -> dict[str, Any]:
    """Return the same with query and cache in one tensor each, block tables and sinks."""
    problem = PLANNED_CASE.build("cpu")
    given = plan_arguments(problem, use_sinks=True, **changes)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
        del given[name]
    tables = torch.arange(4, dtype=torch.int32).view(2, 2)
    metadata = mlagen.mla.MLAPlanMetadata.dense(
        torch.arange(3, dtype=torch.int32), tables, problem.seq_lens
    )
    wrapper = mlagen.mla.BatchMLAPagedAttentionWrapper(torch.zeros(1 << 20))
    wrapper.plan(metadata=metadata, **given)
    return {
        "wrapper": wrapper,
        "query": torch.zeros(2, 16, 576, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(9, 64, 576, dtype=torch.bfloat16),
        "sinks": torch.zeros(16),
        "out": torch.zeros(2, 16, 512, dtype=torch.bfloat16),
    }
