"""Modules in place of SGLang, with the names that the plugin and its tests take from it.

``test_signatures.py`` compares them with SGLang where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial, partialmethod
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

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

    _handlers: dict[str, Any] = {"dsa": object(), "trtllm_mla": object()}  # noqa: RUF012

    @classmethod
    def register(cls, backend_name: str, handler_func: Any) -> None:
        """Add a backend."""
        cls._handlers[backend_name] = handler_func

    @classmethod
    def get_handler(cls, backend_name: str) -> Any:
        """Return the handler of a backend."""
        return cls._handlers[backend_name]


class SarvamRegistry(AttentionBackendRegistry):
    """How the Sarvam models treat the backends."""

    _handlers: dict[str, Any] = {"dsa": object(), "trtllm_mla": object()}  # noqa: RUF012


def _function(name: str, parameters: str, result: Any = None) -> Any:
    """Return a function of SGLang, by its name."""
    function = stub(parameters, result)
    function.__name__ = name
    return function


def attention_backends_of(cfg: Any) -> tuple[str | None, str | None]:
    """Return the prefill and the decode backend of a server."""
    base = cfg.attention_backend
    return cfg.prefill_attention_backend or base, cfg.decode_attention_backend or base


class TRTLLMMLABackend:
    """The backend whose decode kernel the plugin replaces."""

    data_type: torch.dtype

    def __init__(self, model_runner: Any, **_: Any) -> None:
        raise NotImplementedError

    def _compute_decode_bmm1_scale(self, layer: Any) -> float:
        is_fp8 = self.data_type == torch.float8_e4m3fn
        return float(layer.scaling * (layer.k_scale_float if is_fp8 else 1.0))

    _run_decode_kernel = stub(
        "self query kv_cache block_tables seq_lens max_seq_len layer causal_seqs cp_world "
        "cp_rank return_lse"
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
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, **kwargs: Any
    ) -> Any:
        """Attend to slots that the indexer chose, where nothing is to be saved."""
        del k, v, forward_batch
        assert self.dsa_decode_impl == "fa3"
        metadata = self.forward_metadata
        return self._forward_fa3(
            q_rope=kwargs["q_rope"],
            kv_cache=self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            v_head_dim=layer.v_head_dim,
            q_nope=q.view(-1, layer.tp_q_head_num, layer.v_head_dim),
            page_table=kwargs["topk_indices"],
            cache_seqlens=metadata.dsa_cache_seqlens_int32,
            cu_seqlens_q=metadata.dsa_cu_seqlens_q,
            cu_seqlens_k=metadata.dsa_cu_seqlens_k,
            max_seqlen_q=metadata.dsa_max_seqlen_q,
            sm_scale=layer.scaling,
            logit_cap=layer.logit_cap,
            page_size=1,
        )

    _forward_fa3 = stub(
        "self q_rope kv_cache v_head_dim q_nope page_table cache_seqlens cu_seqlens_q "
        "cu_seqlens_k max_seqlen_q sm_scale logit_cap page_size"
    )


class RadixAttention(torch.nn.Module):
    """An attention layer, which knows its heads on a rank."""

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        logit_cap: float = 0.0,
        v_head_dim: int = -1,
        sliding_window_size: int = -1,
        **others: Any,
    ) -> None:
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num = num_heads, num_kv_heads
        self.tp_v_head_num = num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size
        self.logit_capping_method = others.get("logit_capping_method", "tanh")
        self.xai_temperature_len = -1


class TRTLLMHAAttnBackend:
    """The backend of GQA models whose decode kernel the plugin replaces."""

    is_xqa_impl: bool
    max_context_len: int
    q_data_type: torch.dtype
    page_size: int
    forward_metadata: Any
    token_to_kv_pool: Any
    _xqa_spec_dec_mask: torch.Tensor | None

    def __init__(self, model_runner: Any, **_: Any) -> None:
        raise NotImplementedError

    def _reshape_paged_kv_cache(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, layer: Any, head_dim: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def paged(cache: torch.Tensor) -> torch.Tensor:
            pages = cache.view(-1, self.page_size, layer.tp_k_head_num, head_dim)
            return pages.permute(0, 2, 1, 3)

        return paged(k_cache), paged(v_cache)

    def forward_decode(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attend with one query token of each request, where nothing is to be saved."""
        del k, v, forward_batch, save_kv_cache
        return _attend(self, q, layer, kwargs["sinks"], q_len_per_req=1)

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Verify drafts, where nothing is to be saved."""
        del k, v, save_kv_cache
        assert forward_batch.forward_mode.is_target_verify()
        options = {"q_len_per_req": self.forward_metadata.max_seq_len_q}
        options |= {"mask": self._xqa_spec_dec_mask}
        return _attend(self, q, layer, kwargs["sinks"], **options)

    _run_fixed_q_len_decode = stub(
        "self query kv_cache block_tables seq_lens bmm1_scale bmm2_scale window_left "
        "sinks q_len_per_req kv_cache_sf out out_dtype mask"
    )


def _attend(
    backend: TRTLLMHAAttnBackend, q: torch.Tensor, layer: Any, sinks: Any, **options: Any
) -> Any:
    keys, values = backend.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    out = backend._run_fixed_q_len_decode(
        q.view(-1, layer.tp_q_head_num, layer.head_dim),
        backend._reshape_paged_kv_cache(keys, values, layer, layer.head_dim),
        backend.forward_metadata.page_table,
        backend.forward_metadata.cache_seqlens_int32,
        bmm1_scale=layer.scaling,
        bmm2_scale=1.0,
        window_left=layer.sliding_window_size,
        sinks=sinks,
        out_dtype=backend.q_data_type,
        **options,
    )
    return out.view(-1, layer.tp_q_head_num * layer.head_dim)


def is_minimax_sparse(config: Any) -> bool:
    """Return whether a model is a MiniMax-M3."""
    return bool(config.architectures[0].startswith("MiniMaxM3Sparse"))


def is_qwen_qsa(config: Any) -> bool:
    """Return whether a model is a Qwen3.8 with an indexer."""
    return getattr(config, "indexer_n_heads", None) is not None


flash_decode_with_gqa_share_sparse = stub(
    "q sink k_cache v_cache req_to_token seq_lens slot_ids block_size topk_idx sm_scale use_tma "
    "page_size q_scale k_scale v_scale hisparse_slots"
)


class QwenSparseAttnBackend:
    """The backend of Qwen3.8's sparse layers."""

    _forward_paged_attention = stub("self q layer forward_batch topk_indices")


class DeepSeekV4TokenToKVPool:
    """The pools of DeepSeek-V4."""


class DSV4AttnMetadata:
    """A step's lists of tokens."""


class DeepseekV4AttnBackend:
    """The backend of DeepSeek-V4 whose decode the plugin replaces."""

    forward_metadata: Any
    token_to_kv_pool: Any
    softmax_scale: float
    head_dim_v: int
    _flash_mla_with_kvcache: Any

    def __init__(self, model_runner: Any, **_: Any) -> None:
        raise NotImplementedError

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Attend with the tokens of a step, whose keys are stored."""
        return self._forward_attention(q, k, v, layer, forward_batch, *args, **kwargs)

    def _forward_attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        compress_ratio: Any,
        save_kv_cache: bool = True,
        attn_sink: Any = None,
        cos_sin_cache: Any = None,
        **_: Any,
    ) -> Any:
        del k, v, forward_batch, save_kv_cache, cos_sin_cache
        core, pool = self.forward_metadata.core_attn_metadata, self.token_to_kv_pool
        width = pool.get_swa_key_bytes_per_token()

        def paged(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
            return buffer[:, : page_size * width].view(-1, page_size, 1, width)

        extra: Any = dict.fromkeys(("cache", "indices", "lengths"))
        if compress_ratio:
            extra["cache"] = paged(
                pool.get_extra_key_buffer(layer.layer_id),
                pool.get_extra_key_page_size(layer.layer_id),
            )
            extra["indices"] = core.sparse_page_indices(compress_ratio).unsqueeze(1)
            extra["lengths"] = core.sparse_topk_lengths(compress_ratio)
        buffer = pool.get_swa_key_buffer_radix(layer.layer_id)
        return self._flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=paged(buffer, pool.get_swa_key_page_size()),
            head_dim_v=self.head_dim_v,
            block_table=None,
            cache_seqlens=None,
            tile_scheduler_metadata=core.get_flashmla_metadata(compress_ratio),
            softmax_scale=self.softmax_scale,
            is_fp8_kvcache=True,
            indices=core.swa_page_indices.unsqueeze(1),
            topk_length=core.swa_topk_lengths,
            attn_sink=attn_sink,
            extra_k_cache=extra["cache"],
            extra_indices_in_kvcache=extra["indices"],
            extra_topk_length=extra["lengths"],
        )[0].squeeze(1)


class HookType(Enum):
    """How a hook of a plugin is called."""

    AROUND = "around"


class HookSource(NamedTuple):
    """The plugin of a hook."""

    plugin_name: str
    dist_name: str | None


class HookRegistry:
    """What plugins put around functions of SGLang."""

    _hooks: dict[str, Any] = {}  # noqa: RUF012
    _patched: set[str] = set()  # noqa: RUF012

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: Any, *, source: HookSource) -> None:
        """Add a hook."""
        assert (hook_type, source.dist_name) == (HookType.AROUND, "mlagen")
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        """Replace the functions that have hooks."""
        for target, hook in cls._hooks.items():
            if target not in cls._patched:
                owner, _, name = target.rpartition(".")
                owner = resolve_name(owner)
                setattr(owner, name, partialmethod(_hooked, hook, getattr(owner, name)))
                cls._patched.add(target)


def _hooked(self: Any, hook: Any, theirs: Any, *args: Any, **keywords: Any) -> Any:
    return hook(theirs, self, *args, **keywords)


class DraftBackendFactory:
    """The backends of a draft model, by the names of the target's."""

    def __init__(
        self, draft_model_runner: Any, topk: int, speculative_num_steps: int, **_: Any
    ) -> None:
        assert topk == 1
        self.draft_model_runner = draft_model_runner
        self.speculative_num_steps = speculative_num_steps
        self.draft_attn_backend = draft_model_runner.draft_attention_backend

    def _create_backend(
        self,
        backend_name: str,
        backend_map: Any,
        error_template: str,
        stamps_children: bool = False,
    ) -> Any:
        del backend_name
        name = self.draft_attn_backend
        if name not in backend_map:
            raise ValueError(error_template.format(backend_type=name))
        stamp, backend = backend_map[name]()
        for each in (backend, *(backend.attn_backends if stamps_children else ())):
            each.prefill_attention_backend_str = stamp
            each.decode_attention_backend_str = stamp
        return backend

    def create_decode_backend(self) -> Any:
        """Return the backends of the steps of a draft model."""
        known = {name: partial(_steps_of, self, name) for name in DRAFTED}
        template = "EAGLE is not supported in decode attention backend {backend_type}"
        return self._create_backend(
            "decode_attention_backend", known, template, stamps_children=True
        )

    def create_draft_extend_backend(self) -> Any:
        """Return the backend that appends the accepted tokens."""
        known = {name: partial(_step_of, self, name) for name in DRAFTED}
        template = "EAGLE is not supported in attention backend {backend_type}"
        return self._create_backend("prefill_attention_backend", known, template)


def _step_of(factory: DraftBackendFactory, name: str) -> tuple[str, Any]:
    return name, DRAFTED[name](factory.draft_model_runner)


def _steps_of(factory: DraftBackendFactory, name: str) -> tuple[str, Any]:
    steps = [_step_of(factory, name)[1] for _ in range(factory.speculative_num_steps - 1)]
    return name, SimpleNamespace(attn_backends=steps)


DRAFTED: dict[str, Any] = {
    "trtllm_mha": TRTLLMHAAttnBackend,
    "trtllm_mla": TRTLLMMLABackend,
    "dsa": DeepseekSparseAttnBackend,
    "dsv4": DeepseekV4AttnBackend,
}


PREDICATES: list[tuple[Callable[[str], bool], Callable[..., dict[str, Any]]]] = []


def register_model_override_predicate(predicate: Callable[[str], bool]) -> Callable[[Any], Any]:
    """Return a decorator that adds what decides options for the models of a predicate."""

    def decorator(fn: Any) -> Any:
        PREDICATES.append((predicate, fn))
        return fn

    return decorator


CHOICES: dict[str, list[str]] = {"named": ["trtllm_mla"], "chunked": ["trtllm_mla"]}

# The modules of SGLang with the names that the plugin imports.
MODULES: dict[str, dict[str, Any]] = {
    "sglang.srt.arg_groups.choices": {
        "ATTENTION_BACKEND_CHOICES": CHOICES["named"],
        "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": CHOICES["chunked"],
        "add_attention_backend_choices": CHOICES["named"].extend,
        "add_chunked_prefix_cache_attention_backend": CHOICES["chunked"].append,
    },
    "sglang.srt.arg_groups.model_hook": named(attention_backends_of),
    "sglang.srt.arg_groups.model_override_base": named(
        register_model_override_predicate, _PREDICATE_OVERRIDE_FNS=PREDICATES
    ),
    "sglang.srt.arg_groups.overrides": named(
        attention_backends_of, _function("resolved_view", "server_args")
    ),
    "sglang.srt.configs.model_config": named(is_minimax_sparse),
    "sglang.srt.layers.attention.attention_registry": named(
        register_attention_backend, ATTENTION_BACKENDS=ATTENTION_BACKENDS
    ),
    "sglang.srt.layers.attention.dsa_backend": named(DeepseekSparseAttnBackend),
    "sglang.srt.layers.attention.deepseek_v4_backend": named(
        DSV4AttnMetadata, DeepseekV4AttnBackend
    ),
    "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse": {
        "flash_decode_with_gqa_share_sparse": flash_decode_with_gqa_share_sparse
    },
    "sglang.srt.layers.attention.qsa.config": named(is_qwen_qsa),
    "sglang.srt.layers.attention.qwen_sparse_attn_backend": named(QwenSparseAttnBackend),
    "sglang.srt.layers.attention.trtllm_mha_backend": named(TRTLLMHAAttnBackend),
    "sglang.srt.layers.attention.trtllm_mla_backend": named(TRTLLMMLABackend),
    "sglang.srt.layers.radix_attention": named(RadixAttention),
    "sglang.srt.mem_cache.deepseek_v4_memory_pool": named(DeepSeekV4TokenToKVPool),
    "sglang.srt.models.deepseek_common.attention_backend_handler": named(AttentionBackendRegistry),
    "sglang.srt.models.sarvam_moe": {"AttentionBackendRegistry": SarvamRegistry},
    "sglang.srt.models.deepseek_common.utils": {
        "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["trtllm_mla"]
    },
    "sglang.srt.plugins.hook_registry": named(HookRegistry, HookSource, HookType),
    "sglang.srt.runtime_context": named(
        _function(
            *("get_exec", ""),
            SimpleNamespace(
                kernel=SimpleNamespace(dsv4_attn_backend="flashmla"),
                deterministic=SimpleNamespace(enable_deterministic_inference=False),
            ),
        ),
        _function("get_parallel", "", SimpleNamespace(dcp_enabled=False, attn_dcp_size=1)),
        _function(
            "get_platform", "", SimpleNamespace(is_blackwell=False, is_sm100=False, is_sm120=False)
        ),
        _function("get_spec", "", SimpleNamespace()),
        _function("max_speculative_num_draft_tokens", ""),
    ),
    "sglang.srt.speculative.draft_utils": named(DraftBackendFactory),
}
