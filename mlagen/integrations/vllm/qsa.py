"""Qwen3.8 in vLLM: its token-sparse layers (QSA) with mlagen's decode."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from vllm.logger import init_logger

from mlagen.integrations.vllm.dsv4 import with_names
from mlagen.integrations.vllm.warm_up import WARM_UP, sparse_gqa_calls, warmed_backend_of
from mlagen.sparse import qsa_sparse_paged_attention

_BACKEND, _IMPL = "Qwen4ExpQSAFlashAttentionBackend", "Qwen4ExpQSAFlashAttentionImpl"
_logger = init_logger("vllm.mlagen")


@cache
def attention_of(theirs: Any) -> Any:
    """Return vLLM's token-sparse layer with mlagen's decode; prefill stays Triton's.

    Raises LookupError if the layer is not made of the classes of its backend and implementation.
    """
    function = vars(theirs)["__init__"]
    made_of = {
        _BACKEND: warmed_backend_of(function.__globals__[_BACKEND], _calls_of),
        _IMPL: impl_of(function.__globals__[_IMPL]),
    }
    make = with_names(function, **made_of)
    _logger.info("Using MLAGEN_GQA for the decode of %s.", theirs.__module__)

    class MlagenQSAAttention(theirs):
        def __init__(self, **layer: Any) -> None:
            make(self, **layer)
            WARM_UP.register_warmup()

    return MlagenQSAAttention


@cache
def impl_of(triton: Any) -> Any:
    """Return vLLM's implementation with mlagen for batches that have no prompt in them."""

    class MlagenQSAImpl(triton):
        def forward_qsa(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            token_to_req: torch.Tensor,
            use_prefill_config: bool,
            output_gate: torch.Tensor,
            output_scale: torch.Tensor | None = None,
            output_block_scale: torch.Tensor | None = None,
        ) -> torch.Tensor:
            if use_prefill_config or output_scale is not None or output_block_scale is not None:
                given = (query, key, value, kv_cache, attn_metadata, output)
                sparse = (token_to_req, use_prefill_config, output_gate)
                out: torch.Tensor = super().forward_qsa(
                    layer, *given, *sparse, output_scale, output_block_scale
                )
                return out
            tokens = attn_metadata.num_actual_tokens
            output[tokens:].zero_()  # of padding
            if not tokens:
                return output
            scales = {}
            if kv_cache.dtype == torch.uint8:  # as vLLM stores FP8
                kv_cache = kv_cache.view(torch.float8_e4m3fn)
                scales = {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float}  # noqa: SLF001
            dims = self.head_size  # a key and a value are in one row
            pages = kv_cache.transpose(1, 2)
            qsa_sparse_paged_attention(
                query[:tokens],
                pages[..., :dims],
                pages[..., dims:],
                layer.topk_indices_buffer[:tokens],
                attn_metadata.block_table,
                token_to_req[:tokens],
                use_prefill_config,
                output[:tokens],
                output_gate=output_gate[:tokens],
                **scales,
            )
            return output

    return MlagenQSAImpl


def _call_of(_impl: Any, spec: Any, _dtype: torch.dtype) -> dict[str, Any]:
    return {
        "page_size": spec.block_size,
        "kv_dtype": torch.float8_e4m3fn if spec.dtype == torch.uint8 else spec.dtype,
        "sparse_block": 1,
        "has_output_gate": True,
    }


_calls_of = partial(sparse_gqa_calls, call_of=_call_of)
