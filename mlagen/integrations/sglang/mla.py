"""MLA decode in SGLang: the TensorRT-LLM backend with mlagen's kernels for its decode kernel."""

from __future__ import annotations

import sys
from typing import Any

import torch
from sglang.srt.layers.attention.trtllm_mla_backend import TRTLLMMLABackend
from sglang.srt.models.deepseek_common import utils as models
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
from sglang.srt.runtime_context import get_parallel, get_platform

from mlagen.integrations.sglang.runner import (
    check,
    max_q_len,
    prefill_name,
    serve_drafts,
    warm_up_mla,
)
from mlagen.integrations.warm_up import workspace
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla as decode

_SARVAM = "sglang.srt.models.sarvam_moe"  # its models have handlers of their own


def backend_of(runner: Any, name: str) -> MlagenMLABackend:
    """Return a runner's backend, with warm kernels, that SGLang's models treat as ``trtllm_mla``.

    Raises ValueError if the model has no MLA, no kernel serves it or the options, or prefill would
    take TensorRT-LLM's kernels without Blackwell.
    """
    if not runner.use_mla_backend:
        raise ValueError(f"{name}: expected an MLA model")
    if prefill_name(runner) == name and not get_platform().is_blackwell:
        raise ValueError(
            f"--prefill-attention-backend: expected another backend than {name} on a GPU other "
            "than Blackwell, such as fa3"
        )
    check(runner, name, MlagenMLABackend)
    introduce(name, "trtllm_mla")
    serve_drafts(name, "trtllm_mla", MlagenMLABackend)
    backend = MlagenMLABackend(runner)
    is_fp8 = backend.data_type == torch.float8_e4m3fn  # SGLang quantizes the query then
    warm_up_mla(
        runner,
        backend,
        page_size=runner.page_size,
        query_dtype=backend.data_type if is_fp8 else runner.dtype,
        kv_dtype=backend.data_type,
        max_q_len=max_q_len(runner, name),
        dcp_size=get_parallel().attn_dcp_size,
    )
    return backend


def introduce(name: str, like: str) -> None:
    """Make SGLang's models treat a backend as ``like``, and absorb the weights for it."""
    registries = [AttentionBackendRegistry]
    if _SARVAM in sys.modules:
        registries.append(sys.modules[_SARVAM].AttentionBackendRegistry)
    for registry in registries:
        registry.register(name, registry.get_handler(like))
    if name not in models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        models.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)


class MlagenMLABackend(TRTLLMMLABackend):
    """SGLang's TensorRT-LLM backend; decode steps and drafts run mlagen's kernels."""

    def _run_decode_kernel(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        max_seq_len: int,
        layer: Any,
        *,
        causal_seqs: torch.Tensor | None = None,
        cp_world: int = 1,
        cp_rank: int = 0,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend to the cached tokens, those of this rank under decode context parallel (DCP).

        One query token of a DCP rank attends to all tokens of the rank, several to those before
        them, by the lengths on all ranks in ``causal_seqs``. The LSE is a base-2 logarithm, which
        SGLang takes for a backend of a name that it does not know.
        """
        dcp: dict[str, Any] = {}
        if cp_world > 1 and causal_seqs is not None:
            dcp = {
                "enable_dcp": True,
                "cp_world": cp_world,
                "cp_rank": cp_rank,
                "causal_seqlens_kv_global": causal_seqs.to(torch.int32),
            }
        elif query.shape[1] > 1 and get_parallel().dcp_enabled:
            raise NotImplementedError(
                "mlagen: several query tokens of a DCP rank need causal_seqs, the lengths on all "
                "ranks, which SGLang does not pass here"
            )
        return decode(
            query,
            kv_cache,
            workspace(query.device),
            self.qk_nope_head_dim,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            block_tables,
            seq_lens.to(torch.int32),
            max_seq_len,
            bmm1_scale=self._compute_decode_bmm1_scale(layer),
            return_lse=return_lse,
            return_lse_base="base2",
            **dcp,
        )
