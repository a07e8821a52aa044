"""Problems of BatchMLA, and the arguments of its plan and its run."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.mla import BatchMLAPagedAttentionWrapper
from tests.problems.mla import MlaCase, MlaProblem
from tests.problems.mla_build import LATENT_SCALE, ROPE_SCALE
from tests.problems.problem import E4M3, ints

WORKSPACE_BYTES = 80 << 20


def ragged(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts with the query tokens of each sequence."""
    q_len = facts.pop("q_len", 1)
    return {"q_lens": (q_len,) * len(facts["seq_lens"])} | facts


def batch_case(seqs: tuple[tuple[int, int], ...] = (), **facts: Any) -> MlaCase:
    """Return a case of the wrapper, of sequences with these query and KV lengths."""
    if seqs:
        facts["q_lens"], facts["seq_lens"] = zip(*seqs, strict=True)
    usual = {"page_size": 1, "separate_rope": True, "flat_tables": True}
    return MlaCase(**usual | ragged(facts))


SOME = batch_case(((2, 40), (1, 7), (3, 100), (0, 5)), page_size=16, heads=6)
SINGLE = batch_case(((1, 40), (1, 7), (1, 100), (1, 5)), page_size=16, heads=6)


def plan_arguments(
    problem: MlaProblem, *, metadata: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the keyword arguments of a plan, with tensors on the device ``metadata``."""
    case = problem.case
    tensors: dict[str, Any] = {
        "qo_indptr": problem.cum_seq_lens_q,
        "kv_indptr": problem.extra_args["kv_indptr"],
        "kv_indices": problem.block_tables,
        "kv_len_arr": problem.seq_lens,
    }
    plain = {
        "num_heads": case.heads,
        "head_dim_ckv": case.kv_lora_rank,
        "head_dim_kpe": case.qk_rope_head_dim,
        "page_size": case.page_size,
        "causal": case.is_causal,
        "sm_scale": case.score_scale,
        "q_data_type": case.dtype,
        "kv_data_type": E4M3 if case.kv_format == "e4m3" else case.dtype,
    }
    device = metadata or problem.device
    return {name: tensor.to(device) for name, tensor in tensors.items()} | plain | changes


def run_arguments(problem: MlaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of a run."""
    arguments = {
        "q_nope": problem.query,
        "q_pe": problem.extra_args["query_rope"],
        "ckv_cache": problem.kv_cache,
        "kpe_cache": problem.extra_args["rope_cache"],
    }
    if problem.case.scales:
        arguments["kpe_scale"] = ROPE_SCALE
    if problem.case.scales == "two":
        arguments["ckv_scale"] = LATENT_SCALE
    elif problem.case.scales:
        arguments["ckv_scale_arr"] = problem.extra_args["kv_scales"]
    return arguments | changes


def new_wrapper(device: torch.device | str, backend: str = "auto") -> BatchMLAPagedAttentionWrapper:
    """Return a wrapper without a plan; the CPU backend needs no workspace."""
    size = WORKSPACE_BYTES if torch.device(device).type == "cuda" else 0
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    return BatchMLAPagedAttentionWrapper(workspace, backend=backend)


def wrapper_of(
    problem: MlaProblem, *, metadata: str | None = None, backend: str = "auto", **changes: Any
) -> BatchMLAPagedAttentionWrapper:
    """Return a wrapper that has planned the problem, from metadata on ``metadata``."""
    wrapper = new_wrapper(problem.device, backend)
    wrapper.plan(**plan_arguments(problem, metadata=metadata, **changes))
    return wrapper


def run(
    wrapper: BatchMLAPagedAttentionWrapper, problem: MlaProblem, **changes: Any
) -> torch.Tensor:
    """Return the output of a run, with some arguments replaced."""
    out = wrapper.run(**run_arguments(problem, **changes))
    assert isinstance(out, torch.Tensor)
    return out


def run_with_lse(
    wrapper: BatchMLAPagedAttentionWrapper, problem: MlaProblem, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of a run, with some arguments replaced."""
    result = wrapper.run(**run_arguments(problem, return_lse=True, **changes))
    assert isinstance(result, tuple)
    return result


def graph_buffers(problem: MlaProblem, spare: int = 5) -> dict[str, Any]:
    """Return the buffers of a captured graph, with room for some more page ids."""
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    sizes = {name: len(tensor) for name, tensor in plan_arguments(problem).items() if name in names}
    sizes["kv_indices"] += spare
    return {name: ints(*[-1] * size).to(problem.device) for name, size in sizes.items()}


def plan_and_run(plan: dict[str, Any], **arguments: Any) -> Any:
    """Plan with the arguments that a plan has, and run with the others."""
    plan |= {name: arguments.pop(name) for name in [*arguments] if name in plan}
    wrapper = new_wrapper(arguments["q_nope"].device)
    wrapper.plan(**plan)
    return wrapper.run(**arguments)
