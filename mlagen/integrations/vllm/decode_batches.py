"""Batches of GQA decode by mlagen, beside a backend of vLLM that takes every other batch.

The classes stand before those of the backend. A batch is one of decode if no request has more query
tokens than speculative decoding gives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, max_decode_query_len

from mlagen.decode import xqa_batch_decode_with_kv_cache as decode
from mlagen.integrations.vllm.warm_up import WARM_UP, Named, WarmedGroup
from mlagen.integrations.warm_up import Calls, gqa_calls, workspace
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.variant import has_dim

# Of metadata: masks that mlagen has not.
_OTHER_MASKS = ("mm_prefix_range_tensor", "rswa_window")


class Sm90Backend(Named):
    """What every GQA backend of mlagen says of itself."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether mlagen has an sm90 kernel for this GPU."""
        return (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether decode has a kernel of these dims, and the rest, too."""
        is_served: bool = super().supports_head_size(head_size)  # type: ignore[misc]
        return has_dim(head_size) and is_served

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return that it is not: another library serves a batch with a prompt."""
        return False


class DecodeBatchesBuilder(WarmedGroup):
    """Of a metadata builder: full graphs hold batches of decode alone."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    num_heads_q: int

    @property
    def kv_dtype(self) -> torch.dtype | DType:
        """The dtype of the cache."""
        raise NotImplementedError

    def decode_calls(self) -> Iterable[Calls]:
        """Return the calls of mlagen that decode the batches of the group."""
        spec = self.kv_cache_spec
        for has_soft_cap in sorted({bool(layer.impl.logits_soft_cap) for layer in self.layers}):
            yield from gqa_calls(
                heads=self.num_heads_q,
                kv_heads=spec.num_kv_heads,
                head_dim=spec.head_size,
                head_dim_vo=spec.head_size_v,
                page_size=spec.block_size,
                query_dtype=self.vllm_config.model_config.dtype,
                kv_dtype=self.kv_dtype,
                max_q_len=max_decode_query_len(self.vllm_config),
                has_soft_cap=has_soft_cap,
            )


class DecodeBatches:
    """Of an implementation: a decode of its own."""

    alibi_slopes: Any
    dcp_world_size: int
    logits_soft_cap: float | None
    scale: float
    sinks: torch.Tensor | None
    sliding_window: tuple[int, int]

    def __init__(self, *args: Any, **layer: Any) -> None:
        super().__init__(*args, **layer)
        if self.alibi_slopes is not None:
            got = repr(self.alibi_slopes)
            raise NotImplementedError(f"mlagen: alibi_slopes is not supported by GQA, got {got}")
        config = get_current_vllm_config_or_none()
        self.max_q_len = 1 if config is None else max_decode_query_len(config)
        WARM_UP.register_warmup()

    def cache_of(self, layer: Any, kv_cache: torch.Tensor, query: torch.Tensor) -> dict[str, Any]:
        """Return the arguments of a decode that depend on the format of the cache."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache: a batch of decode by mlagen, any other as the base."""
        is_decode = (
            attn_metadata is not None  # or a profiling run
            and attn_metadata.max_query_len <= self.max_q_len
            and attn_metadata.causal is True
            and all(getattr(attn_metadata, mask, None) is None for mask in _OTHER_MASKS)
            and self.dcp_world_size == 1
            and output_scale is None
        )
        if is_decode:
            self._decode(layer, query, kv_cache, attn_metadata, output)
            return output
        base: Any = super()
        scales = (output_scale, output_block_scale)
        out: torch.Tensor = base.forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *scales
        )
        return out

    def _decode(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, batch: Any, out: torch.Tensor
    ) -> None:
        """Write the output of a batch, whose requests have one query token or a few."""
        # A request of one token that pads a captured batch has a row too.
        q_len, tokens, ragged = batch.max_query_len, len(batch.seq_lens), {}
        if q_len > 1:
            tokens = batch.num_actual_tokens
            ragged = {"q_cu_seq_lens": batch.query_start_loc, "q_len_per_req": q_len}
        cache = self.cache_of(layer, kv_cache, query)
        query = query[:tokens]
        decode(
            query.to(out.dtype) if query.element_size() == 1 else query,
            workspace_buffer=workspace(query.device),
            block_tables=batch.block_table,
            seq_lens=batch.seq_lens,
            max_seq_len=batch.max_seq_len,
            window_left=self.sliding_window[0],
            out=out[:tokens],
            sinks=self.sinks,
            logits_soft_cap=self.logits_soft_cap,
            **cache,
            **ragged,
        )
