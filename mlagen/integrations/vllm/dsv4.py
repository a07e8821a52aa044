"""DeepSeek-V4 and V4.1 in vLLM: their FlashMLA layers with mlagen's decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from vllm import envs
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from mlagen.integrations.dsv4 import (
    ROW_BYTES,
    dsv4_calls,
    flash_mla_with_kvcache,
    padded_output,
)
from mlagen.integrations.servers import require_batch_invariance
from mlagen.integrations.vllm.warm_up import WARM_UP, Group, warmed_backend_of
from mlagen.integrations.warm_up import Calls
from mlagen.values import require

_logger = init_logger("vllm.mlagen")


@cache
def attention_of(flash_mla: Any) -> Any:
    """Return vLLM's FlashMLA layer with mlagen's decode; prefill stays FlashMLA's.

    Raises LookupError if its decode is not in ``_forward_decode``, or calls another function.
    """
    require_batch_invariance(envs.VLLM_BATCH_INVARIANT, "VLLM_BATCH_INVARIANT")
    function = vars(flash_mla).get("_forward_decode")
    if function is None:
        raise LookupError(f"{flash_mla.__qualname__}: expected a method _forward_decode, got none")
    theirs = with_names(function, flash_mla_with_kvcache=flash_mla_with_kvcache)
    _logger.info("Using MLAGEN_MLA_SPARSE for the decode of %s.", flash_mla.__module__)

    class MlagenDSV4Attention(flash_mla):
        swa_backend_cls = warmed_backend_of(flash_mla.swa_backend_cls, calls_of)

        def __init__(self, *args: Any, **layer: Any) -> None:
            super().__init__(*args, **layer)
            row_bytes = self.swa_cache_layer.packed_bytes_per_token
            rule = f"rows of {ROW_BYTES} bytes with MLAGEN_MLA_SPARSE"
            require(row_bytes == ROW_BYTES, "--attention-backend", rule, row_bytes)
            WARM_UP.register_warmup()

        def _alloc_attn_out(self, num_tokens: int, hidden_states: torch.Tensor) -> torch.Tensor:
            # vLLM takes the real heads of it.
            return padded_output(hidden_states, num_tokens, self.n_local_heads, self.padded_heads)

        def forward_mqa(
            self, q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: torch.Tensor
        ) -> None:
            # vLLM sizes the KV cache by the peak memory of a dummy run, which calls no prefill.
            if get_forward_context().attn_metadata is None and pads_prefill(self):
                prefill_output(output)
            super().forward_mqa(q, kv, positions, output)

        def _forward_prefill(
            self,
            q: torch.Tensor,
            positions: torch.Tensor,
            compressed_k_cache: torch.Tensor | None,
            swa_k_cache: torch.Tensor,
            output: torch.Tensor,
            attn_metadata: Any,
            swa_metadata: Any,
        ) -> None:
            given = (q, positions, compressed_k_cache, swa_k_cache)
            if not pads_prefill(self):
                super()._forward_prefill(*given, output, attn_metadata, swa_metadata)
                return
            padded = prefill_output(output)
            super()._forward_prefill(*given, padded, attn_metadata, swa_metadata)
            heads = slice(self.n_local_heads)
            output[:, heads] = padded[:, heads]

        def _forward_decode(
            self,
            q: torch.Tensor,
            kv_cache: torch.Tensor | None,
            swa_metadata: Any,
            attn_metadata: Any,
            swa_only: bool,
            output: torch.Tensor,
        ) -> None:
            # Without the heads that pad a query for FlashMLA.
            heads = slice(self.n_local_heads)
            out = output[:, heads]
            theirs(self, q[:, heads], kv_cache, swa_metadata, attn_metadata, swa_only, out)

    return MlagenDSV4Attention


def pads_prefill(layer: Any) -> bool:
    """Return whether FlashMLA's prefill writes more heads than a layer has."""
    # V4.1 has kernels of some numbers of heads.
    return bool(getattr(layer, "_prefill_num_heads", layer.padded_heads) != layer.n_local_heads)


def prefill_output(output: torch.Tensor) -> torch.Tensor:
    """Return memory for what FlashMLA's prefill writes, the heads of padding too."""
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


def with_names(function: FunctionType, **names: Any) -> Callable[..., Any]:
    """Return a function with other values of global names; LookupError if it has no such name."""
    for name in names:
        if name not in function.__code__.co_names:
            raise LookupError(f"{function.__qualname__}: expected a use of {name}")
    other = FunctionType(function.__code__, function.__globals__ | names, function.__name__)
    other.__defaults__, other.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return other


def calls_of(group: Group) -> Iterable[Calls]:
    """Yield the calls of mlagen for the layers of a group."""
    for heads in sorted({layer.n_local_heads for layer in group.layers}):
        yield from dsv4_calls(heads)
