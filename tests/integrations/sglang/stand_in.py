"""Modules in place of SGLang, with the names that the plugin and its tests take from it.

``test_signatures.py`` compares them with SGLang where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.integrations.servers import named
from tests.integrations.sglang import stand_in_backends as backends

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


def get_parallel() -> Any:
    """Return the ranks of the process."""
    return SimpleNamespace(dcp_enabled=False, attn_dcp_size=1)


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


def get_spec() -> Any:
    """Return the options of speculative decoding."""
    return SimpleNamespace()


def max_speculative_num_draft_tokens() -> int | None:
    """Return the most query tokens of a request in a verification."""
    return None


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
    "sglang.srt.arg_groups.overrides": named(attention_backends_of, resolved_view),
    "sglang.srt.layers.attention.attention_registry": named(
        register_attention_backend, ATTENTION_BACKENDS=ATTENTION_BACKENDS
    ),
    "sglang.srt.layers.attention.dsa_backend": named(backends.DeepseekSparseAttnBackend),
    "sglang.srt.layers.attention.trtllm_mha_backend": named(backends.TRTLLMHAAttnBackend),
    "sglang.srt.layers.attention.trtllm_mla_backend": named(backends.TRTLLMMLABackend),
    "sglang.srt.layers.radix_attention": named(backends.RadixAttention),
    "sglang.srt.models.deepseek_common.attention_backend_handler": named(
        AttentionBackendRegistry, handle_attention_dsa, handle_attention_trtllm_mla
    ),
    "sglang.srt.models.deepseek_common.utils": {
        "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["trtllm_mla"]
    },
    "sglang.srt.plugins.hook_registry": named(backends.HookRegistry, backends.HookType),
    "sglang.srt.runtime_context": named(
        get_parallel, get_platform, get_spec, max_speculative_num_draft_tokens
    ),
    "sglang.srt.speculative.draft_utils": named(backends.DraftBackendFactory),
}
