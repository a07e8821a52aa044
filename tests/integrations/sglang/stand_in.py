"""Modules in place of SGLang, with the names that the plugin and its tests take from it.

``test_signatures.py`` compares them with SGLang where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from tests.integrations.servers import named, stub

ATTENTION_BACKENDS: dict[str, Callable[[Any], Any]] = {}


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    """Return a decorator that adds the constructor of a backend."""

    def decorator(fn: Any) -> Any:
        ATTENTION_BACKENDS[name] = fn
        return fn

    return decorator


class AttentionBackendRegistry:
    """How the DeepSeek models treat the backends."""

    _handlers: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def register(cls, backend_name: str, handler_func: Any) -> None:
        """Add a backend."""
        cls._handlers[backend_name] = handler_func

    @classmethod
    def get_handler(cls, backend_name: str) -> Any:
        """Return the handler of a backend."""
        return cls._handlers[backend_name]


def handle_attention_trtllm_mla(attn: Any, forward_batch: Any) -> None:
    """Choose between absorbed and expanded MLA."""


def handle_attention_dsa(attn: Any, forward_batch: Any) -> None:
    """Choose between absorbed and expanded MLA, as the backend decided for the batch."""


class TRTLLMMLABackend:
    """The backend whose decode kernel the plugin replaces."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    data_type: torch.dtype

    def __init__(self, model_runner: Any, **_: Any) -> None:
        raise NotImplementedError

    def _compute_decode_bmm1_scale(self, layer: Any) -> float:
        is_fp8 = self.data_type == torch.float8_e4m3fn
        return float(layer.scaling * (layer.k_scale_float if is_fp8 else 1.0))

    _run_decode_kernel = stub(
        *("self", "query", "kv_cache", "block_tables", "seq_lens", "max_seq_len", "layer"),
        *("causal_seqs", "cp_world", "cp_rank", "return_lse"),
    )


class DeepseekSparseAttnBackend:
    """The backend of models with an indexer, which has a method for each kernel of decode."""

    kv_cache_dim: int
    kv_cache_dtype: torch.dtype
    dcp_size: int
    physical_page_size: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    dsa_decode_impl: str
    forward_metadata: Any
    token_to_kv_pool: Any

    def __init__(self, model_runner: Any, **_: Any) -> None:
        raise NotImplementedError

    def forward_decode(
        self,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: Any = None,
        topk_indices: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Attend to slots that the indexer chose, where nothing is to be saved."""
        del k, v, forward_batch, save_kv_cache, k_rope
        assert (self.dsa_decode_impl, q_rope is None) == ("fa3", False)
        metadata = self.forward_metadata
        return self._forward_fa3(
            q_rope=q_rope,
            kv_cache=self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            v_head_dim=layer.v_head_dim,
            q_nope=q.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            page_table=topk_indices,
            cache_seqlens=metadata.dsa_cache_seqlens_int32,
            cu_seqlens_q=metadata.dsa_cu_seqlens_q,
            cu_seqlens_k=metadata.dsa_cu_seqlens_k,
            max_seqlen_q=metadata.dsa_max_seqlen_q,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            page_size=1,
        )

    _forward_fa3 = stub(
        *("self", "q_rope", "kv_cache", "v_head_dim", "q_nope", "page_table", "cache_seqlens"),
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "sm_scale", "logit_cap", "page_size"),
    )


def get_parallel() -> Any:
    """Return the ranks of the process."""
    return SimpleNamespace(dcp_enabled=False)


def get_platform() -> Any:
    """Return the facts of the machine."""
    return SimpleNamespace(is_blackwell=False)


def attention_backends_of(cfg: Any) -> tuple[str | None, str | None]:
    """Return the prefill and the decode backend of a server."""
    base = cfg.attention_backend
    return cfg.prefill_attention_backend or base, cfg.decode_attention_backend or base


def resolved_view(server_args: Any) -> Any:
    """Return the arguments of a server after their resolution."""
    return server_args


CHOICES: dict[str, list[str]] = {"named": ["trtllm_mla"], "chunked": ["trtllm_mla"]}

# The modules of SGLang with the names that the plugin imports.
MODULES: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.choices": {
        "ATTENTION_BACKEND_CHOICES": CHOICES["named"],
        "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": CHOICES["chunked"],
        "add_attention_backend_choices": CHOICES["named"].extend,
        "add_chunked_prefix_cache_attention_backend": CHOICES["chunked"].append,
    },
    "sglang.srt.arg_groups.overrides": named(attention_backends_of, resolved_view),
    "sglang.srt.layers.attention.attention_registry": named(
        register_attention_backend, ATTENTION_BACKENDS=ATTENTION_BACKENDS
    ),
    "sglang.srt.layers.attention.dsa_backend": named(DeepseekSparseAttnBackend),
    "sglang.srt.layers.attention.trtllm_mla_backend": named(TRTLLMMLABackend),
    "sglang.srt.models.deepseek_common.attention_backend_handler": named(
        AttentionBackendRegistry, handle_attention_dsa, handle_attention_trtllm_mla
    ),
    "sglang.srt.models.deepseek_common.utils": {
        "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["trtllm_mla"]
    },
    "sglang.srt.runtime_context": named(get_parallel, get_platform),
}
