"""MiniMax-M3 in vLLM: its sparse layers with mlagen's decode."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from vllm.logger import init_logger

from mlagen.integrations.vllm.dsv4 import with_names
from mlagen.integrations.vllm.warm_up import WARM_UP, impls_of
from mlagen.integrations.warm_up import Calls, gqa_calls
from mlagen.msa_ops import msa_sparse_decode_attention

_logger = init_logger("vllm.mlagen")


@cache
def impl_of(triton: Any) -> Any:
    """Return vLLM's Triton attention of sparse layers with mlagen's decode; prefill stays Triton's.

    Raises
    ------
    LookupError
        If its ``forward`` calls no ``minimax_m3_sparse_attn_decode``.
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


@cache
def backend_of(triton: Any) -> Any:
    """Return vLLM's backend of sparse layers, whose builder warms layers up."""

    class MlagenM3SparseMetadataBuilder(triton.get_builder_cls()):  # type: ignore[misc]
        def __init__(
            self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.impls = impls_of(vllm_config, layer_names)
            WARM_UP.add(self)

        def decode_calls(self) -> Iterable[Calls]:
            """Return the calls of mlagen for the layers of the group."""
            dtype = self.vllm_config.model_config.dtype
            for impl in self.impls:
                yield from gqa_calls(
                    heads=impl.num_heads,
                    kv_heads=impl.num_kv_heads,
                    head_dim=impl.head_size,
                    page_size=impl.block_size,
                    query_dtype=dtype,
                    kv_dtype=impl.kv_cache_fp8_dtype if impl.use_fp8_kv else dtype,
                    sparse_block=impl.block_size,
                )

        def warm_up_prefill(self) -> None:
            """Leave the prefill to vLLM."""

    class MlagenM3SparseBackend(triton):
        @staticmethod
        def get_builder_cls() -> Any:
            """Return the class that builds the metadata of a batch."""
            return MlagenM3SparseMetadataBuilder

    return MlagenM3SparseBackend


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
