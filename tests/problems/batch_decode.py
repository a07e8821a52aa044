"""GQA problems for the batch decode wrapper: the arguments of its plan and its run."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from mlagen.decode import BatchDecodeWithPagedKVCacheWrapper
from tests.problems.gqa import GqaProblem

WORKSPACE_BYTES = 80 << 20

# Page ids in front of those of the first request; none of them exists.
_UNUSED = (-7, 1 << 30)


def plan_arguments(
    problem: GqaProblem, *, metadata: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the keyword arguments of a plan, with tensors on the device ``metadata``."""
    case, counts = problem.case, problem.case.page_counts
    used = [problem.block_tables[seq, :count].cpu() for seq, count in enumerate(counts)]
    tails = [(length - 1) % case.page_size + 1 if length else 0 for length in case.seq_lens]
    tensors = {
        "indptr": torch.tensor(list(accumulate(counts, initial=len(_UNUSED))), dtype=torch.int32),
        "indices": torch.cat([torch.tensor(_UNUSED, dtype=torch.int32), *used]),
        "last_page_len": torch.tensor(tails, dtype=torch.int32),
    }
    plain = {
        "num_qo_heads": case.heads,
        "num_kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "page_size": case.page_size,
        "window_left": case.window - 1,
        "logits_soft_cap": case.soft_cap,
        "q_data_type": case.dtype,
        "kv_data_type": problem.store.key.dtype,
        "o_data_type": case.out_dtype,
        "sm_scale": case.scale,
        "q_len_per_req": case.q_len,
        "is_causal": case.causal,
        "use_token_head_sf": case.has_token_scales,
    }
    if case.head_dim_vo:
        plain["head_dim_vo"] = case.head_dim_vo
    device = metadata or problem.device
    return {name: tensor.to(device) for name, tensor in tensors.items()} | plain | changes


def run_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of a run."""
    case = problem.case
    arguments = {
        "q": problem.query,
        "paged_kv_cache": problem.store.caches(case.cache_layout, case.layout),
        "kv_cache_sf": problem.store.scales(case.cache_layout, case.layout),
        "v_scale": case.output_scale,
        "sinks": problem.sinks,
    }
    return arguments | changes


def forward_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of a forward, which has a scale of its own."""
    given = run_arguments(problem, sm_scale=problem.case.scale)
    return {name: given[name] for name in ("q", "paged_kv_cache", "v_scale", "sm_scale")} | changes


def workspace_for(problem: GqaProblem) -> torch.Tensor:
    """Return scratch for the runs of a problem; the CPU backend needs none."""
    size = WORKSPACE_BYTES if problem.device.type == "cuda" else 0
    return torch.full((size,), 0xFF, dtype=torch.uint8, device=problem.device)


def wrapper_of(
    problem: GqaProblem, workspace: Any = None, **changes: Any
) -> BatchDecodeWithPagedKVCacheWrapper:
    """Return a wrapper with a plan of the problem."""
    scratch = workspace_for(problem) if workspace is None else workspace
    wrapper = BatchDecodeWithPagedKVCacheWrapper(scratch, problem.case.layout)
    wrapper.plan(**plan_arguments(problem, **changes))
    return wrapper


def run(
    wrapper: BatchDecodeWithPagedKVCacheWrapper, problem: GqaProblem, **changes: Any
) -> torch.Tensor:
    """Return the output of a run."""
    out = wrapper.run(**run_arguments(problem, **changes))
    assert isinstance(out, torch.Tensor)
    return out


def decode_planned(
    problem: GqaProblem, workspace_buffer: torch.Tensor | None = None, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of a planned run."""
    wrapper = wrapper_of(problem, workspace_buffer)
    result = wrapper.run(**run_arguments(problem, return_lse=True, **changes))
    assert isinstance(result, tuple)
    return result


def graph_buffers(problem: GqaProblem, spare: int = 3) -> dict[str, Any]:
    """Return the buffers of a captured graph, with room for some more page ids."""
    given = plan_arguments(problem)
    sizes = {"indptr": 0, "indices": spare, "last_page_len": 0}
    return {
        f"paged_kv_{name}_buffer": torch.full(
            (given[name].shape[0] + more,), -1, dtype=torch.int32, device=problem.device
        )
        for name, more in sizes.items()
    }
