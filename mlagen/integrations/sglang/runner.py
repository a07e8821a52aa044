"""What the backends have in common: checks of a model runner, its warm-up, and draft models."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.layers.attention.qsa.config import is_qwen_qsa
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType
from sglang.srt.runtime_context import (
    get_exec,
    get_parallel,
    get_spec,
    max_speculative_num_draft_tokens,
)

from mlagen.integrations.servers import require_batch_invariance
from mlagen.integrations.sglang import DSV4, MHA, is_deepseek_v4
from mlagen.integrations.warm_up import Calls, mla_calls
from mlagen.integrations.warm_up import warm_up as warm_up_on
from mlagen.values import reject, require

_DTYPES = {
    "dtype": (torch.bfloat16, torch.float16),
    "kv_cache_dtype": (torch.bfloat16, torch.float16, torch.float8_e4m3fn),
}
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
_logger = logging.getLogger("mlagen")
# The draft backends of SGLang, by name, that take the class of ours.
_served: dict[str, tuple[str, type]] = {}


def check(runner: Any, name: str, backend: type) -> None:
    """Require a model and options that the kernels of a backend serve.

    Raises ValueError if SGLang's class has other methods, or a layer would be computed wrong.
    """
    for method, expected, got in _changed_methods(backend):
        reject(name, f"SGLang's {method}{expected}", got)
    is_deterministic = get_exec().deterministic.enable_deterministic_inference
    require_batch_invariance(is_deterministic, "--enable-deterministic-inference")
    for architecture in runner.model_config.hf_config.architectures or ():
        whose = f"{DSV4} for DeepSeek-V4 and V4.1, whose attention is SGLang's dsv4"
        is_of_backend = is_deepseek_v4(architecture) == (name == DSV4)
        require(is_of_backend, name, f"{whose}, and for no other model", architecture)
    width, rule = (
        get_spec().speculative_eagle_topk,
        f"1 with {name}, whose drafts have no tree mask",
    )
    require((width or 1) == 1, "--speculative-eagle-topk", rule, width)
    for field, dtypes in _DTYPES.items():
        dtype = getattr(runner, field)
        require(dtype in dtypes, field, f"one of {dtypes} with {name}", str(dtype))
    for layer in layers_of(runner):
        has_cap = bool(layer.logit_cap)
        require(name == MHA or not has_cap, name, "layers without logit_cap", layer.logit_cap)
    # Qwen3.8 is read token by token, whatever the pages.
    if runner.page_size % 16 and not is_qwen_qsa(runner.model_config.hf_config):
        _logger.warning(
            "page_size: the sm90 kernels need a multiple of 16, got %d; pass --page-size 64",
            runner.page_size,
        )


def prefill_name(runner: Any) -> str | None:
    """Return the backend of prefill by its option."""
    prefill: str | None
    prefill, _ = attention_backends_of(resolved_view(runner.server_args))
    return prefill


def layers_of(runner: Any) -> list[Any]:
    """Return the attention layers of a model; those of MLA have one for each of its forms."""
    return [each for each in runner.model.modules() if isinstance(each, RadixAttention)]


def max_q_len(runner: Any, name: str) -> int:
    """Return the most query tokens of a request in a call: drafts, if decode verifies them."""
    verifies = get_spec().speculative_attention_mode == "decode" or prefill_name(runner) == name
    return (max_speculative_num_draft_tokens() or 1) if verifies else 1


def warm_up(calls: Iterable[Calls]) -> None:
    """Compile and load the kernels of calls in this worker, before it captures graphs."""
    warm_up_on(calls, torch.cuda.current_device())


def warm_up_mla(runner: Any, backend: Any, **calls: Any) -> None:
    """Warm up the layers that attend to latents; with DCP those of the heads of all ranks.

    ``calls`` is what :func:`mla_calls` takes beside their heads and dims.
    """
    rank, rope = backend.kv_lora_rank, backend.qk_rope_head_dim
    dims = (rank + rope, rank)
    heads = [
        each.tp_q_head_num for each in layers_of(runner) if (each.head_dim, each.v_head_dim) == dims
    ]
    if get_parallel().dcp_enabled:
        heads = sorted(heads)[-1:]
    warm_up(
        call
        for count in dict.fromkeys(heads)
        for call in mla_calls(heads=count, kv_lora_rank=rank, qk_rope_head_dim=rope, **calls)
    )


def hook(target: str, function: Callable[..., Any]) -> None:
    """Call a function in place of ``target``, which it gets first; SGLang's log names mlagen."""
    HookRegistry.register(target, function, HookType.AROUND, source=HookSource("mlagen", "mlagen"))
    HookRegistry.apply_hooks()


def serve_drafts(name: str, like: str, backend: type) -> None:
    """Make SGLang accept a backend for draft models, where ``like`` is its own one."""
    if not _served:
        hook(_FACTORY, create_backend)
    _served[name] = (like, backend)


def create_backend(
    theirs: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], Any]],
    *args: Any,
    **keywords: Any,
) -> Any:
    """Call a method of SGLang's factory with our names in ``backend_map``, its list of names."""
    ours = {
        name: partial(_create, name, backend, backend_map[like])
        for name, (like, backend) in _served.items()
    }
    return theirs(factory, backend_name, backend_map | ours, *args, **keywords)


def _create(name: str, backend: type, create: Callable[[], Any]) -> tuple[str, Any]:
    """Return what SGLang creates, with our kernels in it, or in each of its steps.

    Its constructors of the steps name their class.
    """
    _, made = create()
    for each in getattr(made, "attn_backends", [made]):
        each.__class__ = backend
    return name, made


def _changed_methods(backend: type) -> Iterator[tuple[str, str, str]]:
    """Yield the overridden methods that SGLang's class calls by other parameters, or not at all."""
    base = backend.__mro__[1]
    for name, ours in vars(backend).items():
        if not inspect.isfunction(ours) or name == "__init__":
            continue
        theirs = getattr(base, name, None)
        expected, got = (
            f"({', '.join(inspect.signature(each).parameters)})" if callable(each) else "no method"
            for each in (ours, theirs)
        )
        if got != expected:
            yield f"{base.__name__}.{name}", expected, got
