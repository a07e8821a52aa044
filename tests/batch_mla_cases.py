"""BatchMLA problems for every backend, and the arguments of plan and run."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch

from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.cases import MlaCase, MlaProblem
from tests.mla_build import LATENT_SCALE, ROPE_SCALE
from tests.mla_rows import E4M3


def batch_case(
    name: str, seqs: tuple[tuple[int, int], ...], *, page_size: int = 1, **facts: Any
) -> MlaCase:
    """Return a case of sequences with the given query lengths and KV lengths."""
    q_lens, seq_lens = zip(*seqs, strict=True)
    return MlaCase(
        name=name,
        q_lens=q_lens,
        seq_lens=seq_lens,
        page_size=page_size,
        separate_rope=True,
        flat_tables=True,
        **facts,
    )


# Query and KV lengths of a sequence: zero, fewer KV than query, page edges, one long among short.
EDGES = ((1, 0), (3, 1), (7, 3), (5, 11), (0, 9), (17, 17), (1, 33), (11, 16), (2, 97), (1, 64))
_KINDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "rank 256": {"kv_lora_rank": 256},
    "no rope": {"qk_rope_head_dim": 0},
    "e4m3": {"kv_format": "e4m3", "scales": "two"},
    "e4m3, scales of tokens": {"kv_format": "e4m3", "scales": "for 128 elements"},
    "e4m3, no rope": {"kv_format": "e4m3", "scales": "two", "qk_rope_head_dim": 0},
    "e4m3, scales of tokens, no rope": {
        "kv_format": "e4m3",
        "scales": "for 128 elements",
        "qk_rope_head_dim": 0,
    },
}

CASES = (
    *(
        batch_case(
            f"{kind}, page {page}, {'causal' if causal else 'all'}",
            EDGES,
            page_size=page,
            heads=16 if page == 16 else 5,
            is_causal=causal,
            **facts,
        )
        for (kind, facts), page, causal in product(_KINDS.items(), (1, 16), (True, False))
    ),
    *(
        batch_case(
            f"{batch} sequences of {q_len} and {kv_len}, {heads} heads",
            ((q_len, kv_len),) * batch,
            heads=heads,
            dtype=torch.float16,
            page_size=page,
            is_causal=causal,
        )
        for batch, q_len, kv_len, heads, page, causal in (
            (1, 1, 514, 64, 1, True),
            (3, 3, 33, 16, 1, False),
            (5, 1, 0, 16, 16, True),
            (7, 5, 17, 16, 32, True),
            (3, 9, 96, 16, 16, False),
            (1, 15, 114, 64, 1, True),
        )
    ),
    batch_case("a long one among short", ((1, 8736), (3, 11), (1, 0), (2, 79)), heads=16),
    batch_case("a long one, page 64", ((2, 8736), (1, 79)), page_size=64, heads=8),
    *(
        batch_case(f"scores times {scale}", ((2, 200),), query_magnitude=scale, **_KINDS[kind])
        for scale, kind in product((0.01, 20.0), ("bf16", "e4m3"))
    ),
)

WORKSPACE_BYTES = 80 << 20


def wrapper_of(
    problem: MlaProblem, *, metadata: str | None = None, backend: str = "auto", **changes: Any
) -> BatchMLAPagedAttentionWrapper:
    """Return a wrapper that has planned the problem, from metadata on ``metadata``."""
    device = problem.query.device
    size = WORKSPACE_BYTES if device.type == "cuda" else 0
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    wrapper.plan(**plan_arguments(problem, metadata=metadata, **changes))
    return wrapper


def plan_arguments(
    problem: MlaProblem, *, metadata: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Return the keyword arguments of a plan, with tensors on the device ``metadata``."""
    case = problem.case
    tensors = {
        "qo_indptr": problem.cum_seq_lens_q,
        "kv_indptr": problem.extra_args["kv_indptr"],
        "kv_indices": problem.block_tables,
        "kv_len_arr": problem.seq_lens,
    }
    device = metadata or problem.query.device
    on_device = {name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None}
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
    return on_device | plain | changes


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
