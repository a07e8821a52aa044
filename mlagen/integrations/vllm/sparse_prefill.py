"""Sparse prefill over ``fp8_ds_mla`` rows: one conversion to bf16, then the kernel of bf16 rows.

The query tokens of a prefill read each row many times, and the kernel of FP8 rows converts it each
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.mla.sparse_utils import triton_convert_req_index_to_global_index

from mlagen.integrations.vllm.calls import (
    FP8_DS_MLA,
    Query,
    latent_of,
    one_token_each,
    workspace,
)
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla as decode
from mlagen.models.pages import CONVERSION_MIN_HEADS, PAGE_SIZES

# From these query tokens on the conversion pays, on an H200: docs/explanation/performance.md.
MIN_TOKENS = 1024
PAGE_SIZE = max(PAGE_SIZES)
_WIDTH = 576  # of a converted row


@dataclass
class Conversion:
    """The prefills of a batch, whose rows follow each other in a workspace."""

    workspace: torch.Tensor
    num_rows: int
    block_table: torch.Tensor
    starts: torch.Tensor  # in the workspace, of each request
    request_ids: torch.Tensor  # of each query token

    def attend(
        self,
        impl: Any,
        q: Query,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        block_size: int,
        out: torch.Tensor,
    ) -> None:
        """Write the output of query tokens, whose indices count the tokens of their requests."""
        ops.cp_gather_and_upconvert_fp8_kv_cache(
            kv_cache,
            self.workspace[: self.num_rows],
            self.block_table,
            self.starts,
            len(self.block_table),
        )
        width = topk_indices.shape[-1]
        indices, valid_counts = triton_convert_req_index_to_global_index(
            self.request_ids,
            self.block_table,
            topk_indices,
            BLOCK_SIZE=block_size,
            NUM_TOPK_TOKENS=width,
            HAS_PREFILL_WORKSPACE=True,
            prefill_workspace_request_ids=self.request_ids,
            prefill_workspace_starts=self.starts,
            return_valid_counts=True,
        )
        num_pages = -(-self.num_rows // PAGE_SIZE)
        decode(
            one_token_each(q),
            self.workspace[: num_pages * PAGE_SIZE].view(num_pages, PAGE_SIZE, _WIDTH),
            workspace(latent_of(q).device),
            impl.qk_nope_head_dim,
            impl.kv_lora_rank,
            impl.qk_rope_head_dim,
            indices.unsqueeze(1),
            valid_counts,
            width,
            sparse_mla_top_k=width,
            bmm1_scale=impl.scale,
            out=out.unsqueeze(1),
        )


def can_convert(builder: Any, heads: int, kv_cache_dtype: str) -> bool:
    """Return whether prefills of layers with so many heads may be converted."""
    space = builder.chunked_prefill_workspace
    return (
        kv_cache_dtype == FP8_DS_MLA
        and heads >= CONVERSION_MIN_HEADS
        and builder.dcp_world_size == 1
        and space.dtype == torch.bfloat16
        and space.shape[-1] == _WIDTH
        and builder.vllm_config.attention_config.hisparse_config is None
    )


def conversion_of(builder: Any, batch: Any, metadata: Any) -> Conversion | None:
    """Return the conversion of a batch, if it has enough query tokens and rows that fit.

    The workspace is that of the dense prefill, which such a batch does not have.
    """
    count = metadata.num_prefills
    first = metadata.num_reqs - count
    tokens = slice(metadata.num_decode_tokens, metadata.num_actual_tokens)
    if not count or tokens.stop - tokens.start < MIN_TOKENS:
        return None
    if metadata.prefill is not None and metadata.prefill.use_dense_mha:
        return None
    num_rows = int(batch.seq_lens_cpu_upper_bound[first : first + count].sum())
    space = builder.chunked_prefill_workspace
    if num_rows > len(space) // PAGE_SIZE * PAGE_SIZE:
        return None
    lengths = metadata.seq_lens[first : first + count]
    return Conversion(
        workspace=space,
        num_rows=num_rows,
        block_table=metadata.block_table[first : first + count],
        starts=(lengths.cumsum(0) - lengths).int(),
        request_ids=metadata.req_id_per_token[tokens] - first,
    )
