"""Token-sparse grouped-query decode of Qwen3.8 (QSA), with the signature of FlashInfer."""

from __future__ import annotations

import torch

from mlagen.entry_point import OUT_AND_LSE, entry_point
from mlagen.families.common.arguments import (
    chooses_batch_invariant,
    dense_target,
    factor_of,
    require_choice,
    require_dims,
    require_flag,
    require_tensor,
)
from mlagen.families.common.memory import require_memory
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import GqaArgNames, GqaArgs
from mlagen.families.gqa.scratch import with_scratch
from mlagen.torch_ops.outputs import sparse_gqa_output
from mlagen.torch_ops.traced import Op

_NAMES = GqaArgNames(
    query="q",
    key_cache="k_cache",
    value_cache="v_cache",
    key_scales="k_sf",
    kv_scales="k_sf",
    value_scales="v_sf",
    block_tables="block_table",
    block_indices="logical_indices",
    bmm1_scale="k_scale",
    bmm2_scale="v_scale",
)
_BACKENDS = ("auto", "cuda", "triton")


@entry_point(
    GQA,
    outputs="out lse",
    returns=OUT_AND_LSE,
    op=Op(output=sparse_gqa_output, has_lse=True),
)
def qsa_sparse_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    use_prefill_config: bool,
    out: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: torch.Tensor | None = None,
    k_sf: torch.Tensor | None = None,
    v_sf: torch.Tensor | None = None,
    backend: str = "auto",
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    return_lse_base: str = "base2",
    batch_invariant: bool | None = None,
) -> GqaArgs:
    """Attend from each query token to the tokens that its row of indices names.

    Row ``t`` of ``logical_indices`` names tokens of request ``token_to_req[t]``, and its last
    column how many of the others are valid; that is clamped to their number. There is no other
    mask. An index that is negative or past the block table is skipped wherever it is, and so is one
    whose page id is outside of the cache; an index that is there twice counts twice. A query token
    that attends to nothing, or whose request is outside of the table, gives zeros and an LSE of
    minus infinity. The output is rounded, and then multiplied by the sigmoid of ``output_gate``.
    Memory that no index names affects no result. Tensors on the CPU use a slow PyTorch backend with
    the same checks. The call does not synchronize with the device.

    Parameters
    ----------
    q : bf16 or fp16 [tokens, heads, head_dim]
    k_cache, v_cache : as q, e4m3, e5m2, int8, or uint8 with k_sf and v_sf
        Keys and values ``[pages, page_size, kv_heads, head_dim]``, of any strides that are
        multiples of 16 bytes.
    logical_indices : int32 or uint32 [tokens, n + 1]
        Positions in the request, in any order, and their number; rows may be slices of wider ones.
    block_table : int32 or uint32 [batch, max_pages]
        Page ids.
    token_to_req : int32 or uint32 [tokens]
        The request of each query token.
    use_prefill_config : bool
        Ignored.
    out : as q
        Written and returned; allocated if None. One with gaps takes a copy.
    k_scale, v_scale : float
        Factors of keys and values; None means 1. The scores are also multiplied by
        ``head_dim ** -0.5``.
    output_gate : as q, of as many elements, or None
        ``[tokens, heads, head_dim]`` or ``[tokens, heads * head_dim]``, contiguous and aligned to
        8 bytes.
    k_sf, v_sf : e4m3 or uint8 [pages, page_size, kv_heads, head_dim / 16]
        One scale for 16 elements of an NVFP4 cache.
    backend : str
        ``auto``, ``cuda`` and ``triton`` are equivalent.
    lse : fp32 [tokens, heads]
        Written with ``return_lse``; allocated if None.
    return_lse : bool
        Whether to return ``(out, lse)``.
    return_lse_base : str
        ``base2`` or ``basee``.
    batch_invariant : bool
        Whether the bits of a request's results must not depend on the rest of the batch; None means
        what ``MLAGEN_BATCH_INVARIANT`` says.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes or the head dimension.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.sparse.qsa_sparse_paged_attention``; an ``output_gate`` of None,
    ``lse``, ``return_lse``, ``return_lse_base`` and ``batch_invariant`` are mlagen's own.
    """
    require_flag(use_prefill_config, "use_prefill_config")
    require_choice(backend, "backend", _BACKENDS)
    query = require_tensor(q, "q")
    require_memory(query, "q")
    require_dims(query, "q", (3,))
    indices = require_tensor(logical_indices, "logical_indices")
    require_dims(indices, "logical_indices", (2,))
    args = GqaArgs(
        query=query,
        key_cache=k_cache,
        value_cache=require_tensor(v_cache, "v_cache"),
        workspace_buffer=query.new_empty(0),
        block_tables=require_tensor(block_table, "block_table"),
        seq_lens=None,
        max_seq_len=0,
        out=dense_target(out, "out", query, query.dtype, (tuple(query.shape),), of="q"),
        is_out_like_query=True,
        lse=lse,
        return_lse=require_flag(return_lse, "return_lse"),
        return_lse_base=return_lse_base,
        bmm1_scale=query.shape[-1] ** -0.5 * factor_of(k_scale, "k_scale"),
        bmm2_scale=factor_of(v_scale, "v_scale"),
        is_causal=False,
        block_indices=indices,
        sparse_block=1,
        has_index_counts=True,
        token_to_req=require_tensor(token_to_req, "token_to_req"),
        output_gate=output_gate,
        key_scales=k_sf,
        value_scales=v_sf,
        batch_invariant=chooses_batch_invariant(batch_invariant),
        names=_NAMES,
    )
    return with_scratch(args)
