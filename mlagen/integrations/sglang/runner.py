"""What the backends have in common: checks of a model runner, its layers, and their warm-up."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel, get_spec, max_speculative_num_draft_tokens

from mlagen import max_workspace_bytes
from mlagen.integrations.sglang import is_deepseek_v4
from mlagen.integrations.warm_up import Calls
from mlagen.integrations.warm_up import warm_up as warm_up_on

_DTYPES = {
    "dtype": (torch.bfloat16, torch.float16),
    "kv_cache_dtype": (torch.bfloat16, torch.float16, torch.float8_e4m3fn),
}
_logger = logging.getLogger("mlagen")


@cache
def workspace(device: torch.device) -> torch.Tensor:
    """Return the scratch of all layers on ``device``, whose calls follow each other on a stream."""
    # Not the backend's own: trtllm-gen kernels have semaphores in that one, which must stay zero.
    return torch.empty(max_workspace_bytes(device), dtype=torch.uint8, device=device)


def check(runner: Any, name: str, backend: type) -> None:
    """Require a model and options that the kernels of a backend serve.

    Raises
    ------
    ValueError
        If SGLang's class has other methods, or a layer would be computed wrong.
    """
    for method, expected, got in _changed_methods(backend):
        raise ValueError(f"{name}: expected SGLang's {method}{expected}, got {got}")
    for architecture in runner.model_config.hf_config.architectures or ():
        if is_deepseek_v4(architecture):
            raise ValueError(
                f"{name}: expected another model than DeepSeek-V4 and V4.1, whose attention is "
                f"SGLang's dsv4, got {architecture}"
            )
    if (get_spec().speculative_eagle_topk or 1) > 1:
        raise ValueError(
            f"--speculative-eagle-topk: expected 1 with {name}, whose drafts have no tree mask, "
            f"got {get_spec().speculative_eagle_topk}"
        )
    for field, dtypes in _DTYPES.items():
        dtype = getattr(runner, field)
        if dtype not in dtypes:
            raise ValueError(f"{field}: expected one of {dtypes} with {name}, got {dtype}")
    for layer in layers_of(runner):
        if layer.logit_cap:
            raise ValueError(f"{name}: expected layers without logit_cap, got {layer.logit_cap}")
    if runner.page_size % 16:
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


def mla_layers_of(runner: Any, kv_lora_rank: int, qk_rope_head_dim: int) -> list[Any]:
    """Return the layers that attend to latents; with DCP those of the heads of all ranks."""
    dims = (kv_lora_rank + qk_rope_head_dim, kv_lora_rank)
    layers = [each for each in layers_of(runner) if (each.head_dim, each.v_head_dim) == dims]
    if get_parallel().dcp_enabled:
        heads = max((each.tp_q_head_num for each in layers), default=0)
        layers = [each for each in layers if each.tp_q_head_num == heads]
    return layers


def warm_up(calls: Iterable[Calls]) -> None:
    """Compile and load the kernels of calls in this worker, before it captures graphs."""
    warm_up_on(calls, torch.cuda.current_device())


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
