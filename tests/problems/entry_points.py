"""One adapter for each entry point: the arguments of a problem, and the call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import mlagen
from mlagen.mla.flare import run_mla
from tests.problems.batch_mla import (
    batch_case,
    new_wrapper,
    plan_and_run,
    plan_arguments,
    ragged,
    run_arguments,
)
from tests.problems.flare import decode_flare, flare_arguments, flare_case
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.mla import MlaCase, MlaProblem
from tests.problems.problem import E4M3, Problem

E4M3_FACTOR = 4.0  # rcp_out_scale of xqa


@dataclass(frozen=True, kw_only=True)
class EntryPoint:
    """An entry point with a case that it takes, its arguments, and its names of common ones."""

    name: str
    function: Callable[..., Any]
    case: Callable[..., Any]
    arguments: Callable[[Any], dict[str, Any]]
    names: Mapping[str, str]

    def build(self, device: str, **facts: Any) -> Any:
        """Return a problem with these facts."""
        return self.case(**facts).build(device)

    def call(self, problem: Problem, **changes: Any) -> Any:
        """Return what the function returns, with some arguments, by common names, replaced."""
        own = {self.names.get(name, name): value for name, value in changes.items()}
        return self.function(**self.arguments(problem) | own)

    def run(self, problem: Problem, **changes: Any) -> torch.Tensor:
        """Return the output; functions of xqa write one and return None."""
        if self.names.get("out") == "output" and changes.keys().isdisjoint({"out", "output"}):
            changes["out"] = self.new_out(problem)
        result = self.call(problem, **changes)
        if result is None:
            result = changes["out" if "out" in changes else "output"]
        out: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return out

    def new_out(self, problem: Problem, fill: float = math.nan) -> torch.Tensor:
        """Return an output for the call to write, in the shape of its query."""
        shape = (*self.arguments(problem)[self.names["query"]].shape[:-1], problem.out_shape[-1])
        return problem.new_out(fill).view(shape)


def decode(problem: MlaProblem, **changes: Any) -> torch.Tensor:
    """Return the output of ``trtllm_batch_decode_with_kv_cache_mla``."""
    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments(**changes))
    assert isinstance(out, torch.Tensor)
    return out


def decode_with_lse(problem: MlaProblem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of ``trtllm_batch_decode_with_kv_cache_mla``."""
    arguments = problem.arguments(return_lse=True, **changes)
    result = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert isinstance(result, tuple)
    return result


def compute(problem: MlaProblem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE through an entry point that has arguments for the problem."""
    if problem.case.has_trtllm_entry_point and not changes:
        return decode_with_lse(problem)
    out, lse = run_mla(*problem.inputs(return_lse=True, **changes))
    assert lse is not None
    return out, lse


def decode_gqa(problem: GqaProblem, **changes: Any) -> torch.Tensor:
    """Return the output of ``xqa_batch_decode_with_kv_cache``."""
    return ENTRY_POINTS["xqa_batch"].run(problem, **changes)


def decode_gqa_with_lse(problem: GqaProblem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of ``xqa_batch_decode_with_kv_cache``."""
    arguments = problem.arguments(return_lse=True, **changes)
    result = mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)
    assert isinstance(result, tuple)
    return result


def trtllm_gqa_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``trtllm_batch_decode_with_kv_cache``."""
    arguments = problem.arguments()
    assert arguments.pop("causal")
    assert not arguments.pop("logits_soft_cap")
    offsets = arguments["cum_seq_lens_q"] = arguments.pop("q_cu_seq_lens")
    if offsets is not None:
        arguments["q_len_per_req"], arguments["max_q_len"] = None, problem.case.longest_q
    if problem.value_tables is not None:
        arguments["uses_shared_paged_kv_idx"] = False
        both = (problem.block_tables, problem.value_tables)
        arguments["block_tables"] = torch.stack(both, dim=1)
    if problem.case.cp_world:
        arguments |= {
            "return_lse": True,
            "cp_world": problem.case.cp_world,
            "cp_rank": problem.case.cp_rank,
            "causal_seqlens_kv_global": torch.tensor(
                problem.case.committed, dtype=torch.int32, device=problem.device
            ),
        }
    return arguments | changes


def trtllm_gqa_with_lse(problem: GqaProblem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of ``trtllm_batch_decode_with_kv_cache``."""
    arguments = trtllm_gqa_arguments(problem, return_lse=True, **changes)
    result = mlagen.decode.trtllm_batch_decode_with_kv_cache(**arguments)
    assert isinstance(result, tuple)
    return result


def not_written(problem: GqaProblem, workspace: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a workspace and an LSE of NaN, for a call to write."""
    lse = torch.full(problem.query.shape[:-1], math.nan, device=problem.device)
    return {"workspace_buffer": workspace, "lse": lse}


def xqa_arguments(problem: GqaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``xqa``, from those of ``xqa_batch_decode_with_kv_cache``."""
    case, given, query = problem.case, problem.arguments(), problem.query
    assert not case.soft_cap
    if case.q_lens is None:
        leading = (
            (len(case.seq_lens), 1) if case.q_len == 1 else (len(case.seq_lens), 1, case.q_len)
        )
        query = query.view(*leading, case.heads, case.head_dim)
    k_cache, v_cache = given["kv_cache"]
    k_sf_cache, v_sf_cache = given["kv_cache_sf"] or (None, None)
    kv_scale = case.result_scale / (E4M3_FACTOR if case.result_dtype is E4M3 else 1.0)
    q_scale = case.scale * math.sqrt(case.head_dim) / kv_scale
    if case.kv == "16-bit":
        assert kv_scale == 1.0
        kv_scale = 3.0  # ignored
    semaphores = torch.full((8,), 7, dtype=torch.int32, device=problem.device)
    arguments = {
        "q": query,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "page_table": given["block_tables"],
        "seq_lens": problem.seq_lens[:, None],
        "output": problem.new_out().view(*query.shape[:-1], case.value_dim),
        "workspace_buffer": given["workspace_buffer"],
        "semaphores": semaphores.view(torch.uint32),
        "num_kv_heads": case.kv_heads,
        "page_size": case.page_size,
        "sinks": problem.sinks.view(case.kv_heads, -1) if problem.sinks is not None else None,
        "q_scale": q_scale,
        "kv_scale": kv_scale,
        "sliding_win_size": case.window,
        "kv_layout": case.layout,
        "rcp_out_scale": E4M3_FACTOR,
        "q_seq_len": case.longest_q,
        "mask": problem.mask,
        "q_cu_seq_lens": problem.cum_seq_lens_q,
        "causal": case.causal,
        "k_sf_cache": k_sf_cache,
        "v_sf_cache": v_sf_cache,
    }
    return arguments | changes


def xqa_mla_arguments(problem: MlaProblem, **changes: Any) -> dict[str, Any]:
    """Return the keyword arguments of ``xqa_mla``."""
    case = problem.case
    arguments = {
        "q": problem.query,
        "k_cache": problem.kv_cache,
        "v_cache": problem.extra_args.get("value_cache", problem.kv_cache),
        "page_table": problem.block_tables,
        "seq_lens": problem.seq_lens[:, None],
        "output": problem.new_out(),
        "workspace_buffer": problem.arguments()["workspace_buffer"],
        "semaphores": torch.full((8,), 7, dtype=torch.int32, device=problem.device),
        "page_size": case.page_size,
        "q_scale": case.score_scale,
        "kv_scale": case.output_scale,
    }
    return arguments | changes


_MLA_NAMES = {
    **{name: name for name in ("query", "block_tables", "seq_lens", "sinks", "out")},
    "score_scale": "bmm1_scale",
    "value_scale": "bmm2_scale",
}
_XQA_NAMES = {
    "query": "q",
    "block_tables": "page_table",
    "seq_lens": "seq_lens",
    "out": "output",
    "score_scale": "q_scale",
    "value_scale": "kv_scale",
}
_FLARE_NAMES = {"query": "q", "block_tables": "block_table", "seq_lens": "cache_lengths"}


def _planless(**arguments: Any) -> Any:
    return new_wrapper(arguments["q_nope"].device, "cutlass").run(**arguments)


ENTRY_POINTS = {
    entry.name: entry
    for entry in (
        EntryPoint(
            name="trtllm",
            function=mlagen.mla.trtllm_batch_decode_with_kv_cache_mla,
            case=MlaCase,
            arguments=MlaProblem.arguments,
            names=_MLA_NAMES | {"lse": "lse", "offsets": "cum_seq_lens_q"},
        ),
        EntryPoint(
            name="xqa_batch_mla",
            function=mlagen.mla.xqa_batch_decode_with_kv_cache_mla,
            case=MlaCase,
            arguments=MlaProblem.arguments,
            names=_MLA_NAMES,
        ),
        EntryPoint(
            name="xqa_mla",
            function=mlagen.xqa.xqa_mla,
            case=partial(MlaCase, bmm2_scales_scores=True),
            arguments=xqa_mla_arguments,
            names=_XQA_NAMES,
        ),
        EntryPoint(
            name="wrapper",
            function=plan_and_run,
            case=batch_case,
            arguments=lambda problem: {"plan": plan_arguments(problem), **run_arguments(problem)},
            names={"query": "q_nope", "out": "out", "lse": "lse", "offsets": "qo_indptr"}
            | {"block_tables": "kv_indices", "seq_lens": "kv_len_arr"},
        ),
        EntryPoint(
            name="planless",
            function=_planless,
            case=lambda **facts: MlaCase(**ragged(facts), separate_rope=True),
            arguments=lambda problem: {
                **run_arguments(problem),
                "kv_len": problem.seq_lens,
                "page_table": problem.block_tables,
            },
            names={
                "query": "q_nope",
                "block_tables": "page_table",
                "seq_lens": "kv_len",
                "out": "out",
            },
        ),
        EntryPoint(
            name="flare",
            function=decode_flare,
            case=flare_case,
            arguments=flare_arguments,
            names=_FLARE_NAMES | {"out": "output", "offsets": "valid_length"},
        ),
        EntryPoint(
            name="flare, padded",
            function=partial(decode_flare, pad_to=6),
            case=flare_case,
            arguments=flare_arguments,
            names=_FLARE_NAMES,
        ),
        EntryPoint(
            name="xqa_batch",
            function=mlagen.decode.xqa_batch_decode_with_kv_cache,
            case=GqaCase,
            arguments=GqaProblem.arguments,
            names=_MLA_NAMES | {"lse": "lse", "offsets": "q_cu_seq_lens"},
        ),
        EntryPoint(
            name="trtllm_gqa",
            function=mlagen.decode.trtllm_batch_decode_with_kv_cache,
            case=GqaCase,
            arguments=trtllm_gqa_arguments,
            names=_MLA_NAMES | {"lse": "lse", "offsets": "cum_seq_lens_q"},
        ),
        EntryPoint(
            name="xqa",
            function=mlagen.xqa.xqa,
            case=GqaCase,
            arguments=xqa_arguments,
            names=_XQA_NAMES
            | {name: name for name in ("sinks", "lse")}
            | {"offsets": "q_cu_seq_lens"},
        ),
    )
}


def run_xqa(problem: GqaProblem, **changes: Any) -> torch.Tensor:
    """Return the output of ``xqa``."""
    return ENTRY_POINTS["xqa"].run(problem, **changes)


def run_xqa_with_lse(problem: GqaProblem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE of ``xqa``, in the shape of its query."""
    shape = xqa_arguments(problem)["q"].shape[:-1]
    lse = torch.full(shape, math.nan, device=problem.device)
    return run_xqa(problem, lse=lse, **changes), lse
