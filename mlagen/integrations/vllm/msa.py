"""MiniMax-M3 in vLLM: its sparse layers with mlagen's decode."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from vllm.logger import init_logger

from mlagen.integrations.vllm.dsv4 import with_names
from mlagen.integrations.vllm.warm_up import WARM_UP, sparse_gqa_calls, warmed_backend_of
from mlagen.msa_ops import msa_sparse_decode_attention

_logger = init_logger("vllm.mlagen")


@cache
def impl_of(triton: Any) -> Any:
    """Return vLLM's Triton attention of sparse layers with mlagen's decode; prefill stays Triton's.

    Raises LookupError if its ``forward`` calls no ``minimax_m3_sparse_attn_decode``.
    """
    function = vars(triton)["forward"]
    with_names(function, minimax_m3_sparse_attn_decode=None)
    _logger.info("Using MLAGEN_GQA for the decode of %s.", triton.__name__)

    class MlagenM3SparseImpl(triton):
        _scales: tuple[float, float] | None = None
        _forward: Any

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            WARM_UP.register_warmup()

        def forward(self, layer: Any, *args: Any, **named: Any) -> Any:
            scales = (1.0, 1.0)
            if self.use_fp8_kv:
                # Numbers that vLLM keeps beside the tensors, so that no kernel computes factors.
                scales = (layer._k_scale_float, layer._v_scale_float)  # noqa: SLF001 - vLLM's
            if scales != self._scales:
                self._scales = scales
                decode = _decode_of(*scales)
                self._forward = with_names(function, minimax_m3_sparse_attn_decode=decode)
            return self._forward(self, layer, *args, **named)

    return MlagenM3SparseImpl


def backend_of(triton: Any) -> Any:
    """Return vLLM's backend of sparse layers, whose builder warms layers up."""
    return warmed_backend_of(triton, _calls_of)


def _call_of(impl: Any, _spec: Any, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "page_size": impl.block_size,
        "kv_dtype": impl.kv_cache_fp8_dtype if impl.use_fp8_kv else dtype,
        "sparse_block": impl.block_size,
    }


_calls_of = partial(sparse_gqa_calls, call_of=_call_of)


def _decode_of(k_scale_float: float, v_scale_float: float) -> Any:
    """Return what replaces vLLM's function of that name, with the scales of a layer."""

    def minimax_m3_sparse_attn_decode(
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        topk_idx: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        num_kv_heads: int,
        sm_scale: float,
        output: torch.Tensor,
        decode_query_len: int,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None and scale.numel() != 1:
                raise ValueError(
                    f"{name}: expected one for the layer with MLAGEN_GQA, got {list(scale.shape)}"
                )
        dims = q.shape[-1]  # a key and a value are in one row
        msa_sparse_decode_attention(
            q,
            kv_cache[..., :dims],
            kv_cache[..., dims:],
            topk_idx[:num_kv_heads],
            page_table=block_table,
            seqused_k=seq_lens,
            seqlen_q=decode_query_len,
            softmax_scale=sm_scale,
            k_global_scale=k_scale_float,
            v_global_scale=v_scale_float,
            out=output,
        )

    return minimax_m3_sparse_attn_decode
