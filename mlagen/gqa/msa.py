"""Block-sparse grouped-query decode of MiniMax-M3 (MSA), with the signature of FlashInfer."""

from __future__ import annotations

from typing import Any

import torch

from mlagen.entry_point import OUT_AND_LSE, Both, Returns, entry_point
from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    chooses_batch_invariant,
    factor_of,
    reject_unserved,
    require,
    require_dims,
    require_flag,
    require_float32,
    require_tensor,
    require_whole_number,
)
from mlagen.families.common.memory import require_memory
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import GqaArgNames, GqaArgs
from mlagen.families.gqa.scratch import with_scratch
from mlagen.torch_ops.outputs import sparse_gqa_output
from mlagen.torch_ops.traced import Op

_OUT_AND_LSE: Returns[torch.Tensor | Both] = Returns(
    OUT_AND_LSE.expression.replace("return_lse", "return_softmax_lse"), OUT_AND_LSE.annotation
)
_BLOCK = 128  # tokens of a block, which is a page
_MAX_INDICES = 64  # of a query token and KV head

_NAMES = GqaArgNames(
    query="q",
    key_cache="k",
    value_cache="v",
    block_tables="page_table",
    block_indices="q2k_indices",
    seq_lens="seqused_k",
    q_len="seqlen_q",
    bmm1_scale="softmax_scale * k_global_scale",
    bmm2_scale="v_global_scale",
)


@entry_point(
    GQA,
    outputs="out lse",
    returns=_OUT_AND_LSE,
    ignored="partial_dtype force_fused workspace",
    op=Op(output=sparse_gqa_output, has_lse=True, lse_flag="return_softmax_lse"),
)
def msa_sparse_decode_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q2k_indices: torch.Tensor,
    *,
    page_table: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqlen_q: int = 1,
    causal: bool = True,
    softmax_scale: float | None = None,
    return_softmax_lse: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    k_global_scale: float | None = None,
    v_global_scale: float | None = None,
    q_offset: torch.Tensor | None = None,
    partial_dtype: torch.dtype | None = None,  # noqa: ARG001 - of other kernels
    force_fused: bool | None = None,  # noqa: ARG001
    workspace: object = None,  # noqa: ARG001
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    batch_invariant: bool | None = None,
) -> GqaArgs:
    """Decode one or more tokens of each request, each over KV blocks of its own.

    Query token ``i`` of a request is at position ``p = seqused_k - seqlen_q + i``. Its heads of a
    KV head attend to the tokens up to ``p`` in the blocks of 128 tokens that ``q2k_indices`` name
    for that KV head, in one softmax. An index below 0 or above ``p // 128`` is skipped wherever it
    is, and so is one whose page id is outside of the cache; an index that is there twice counts
    twice. A query token that attends to nothing gives zeros and an LSE of minus infinity. Memory
    that no index names affects no result. Tensors on the CPU use a slow PyTorch backend with the
    same checks. The call does not synchronize with the device.

    Parameters
    ----------
    q : bf16 or fp16 [batch * seqlen_q, heads, head_dim]
        ``head_dim`` is 128 in the model; every head dim of grouped-query calls is accepted.
    k, v : as q, e4m3, e5m2 or int8 [pages, kv_heads, 128, head_dim]
        Keys and values, of any strides that are multiples of 16 bytes: also views of a cache that
        has a key and a value in each row.
    q2k_indices : int32 or uint32 [kv_heads, batch * seqlen_q, n]
        The blocks of each query token, 1 to 64, in any order; also a view with other strides
        between query tokens and KV heads.
    page_table : int32 or uint32 [batch, max_pages]
        Page ids; required.
    seqused_k : int32 or uint32 [batch]
        Tokens in the cache, including the new ones; required.
    cu_seqlens_k : None
        Of a cache without pages, which is not implemented.
    seqlen_q : int
        Query tokens of every request.
    causal : bool
        True: there is no other mask.
    softmax_scale : float
        The factor of the scores; None means ``head_dim ** -0.5``.
    return_softmax_lse : bool
        Whether to return ``(out, lse)``, with the natural LSE ``[batch * seqlen_q, heads]``.
    k_scale, v_scale : None
        Of an NVFP4 cache, which is not implemented here.
    k_global_scale, v_global_scale : float
        Factors of keys and values; None means 1.
    q_offset : None
        Of other positions than those above.
    partial_dtype, force_fused, workspace : object
        Ignored: partial results are float32, and scratch is allocated by the call.
    out : as q
        Written and returned, contiguous; allocated if None.
    lse : fp32 [batch * seqlen_q, heads]
        Written with ``return_softmax_lse``; allocated if None.
    batch_invariant : bool
        As for :func:`mlagen.decode.xqa_batch_decode_with_kv_cache`.

    Returns
    -------
    torch.Tensor
        ``out``, in the shape of ``q``, or ``(out, lse)``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; the outputs are unchanged.
    UnsupportedError
        If no kernel supports the dtypes, the head dimension or a keyword.
    CaptureError
        If the kernel is not loaded yet during CUDA graph capture.

    Notes
    -----
    Signature of ``flashinfer.msa_ops.msa_sparse_decode_attention``; ``lse`` and
    ``batch_invariant`` are mlagen's own.
    """
    _reject_unserved(cu_seqlens_k, causal, k_scale, v_scale, q_offset)
    query, keys = require_tensor(q, "q"), require_tensor(k, "k")
    require_memory(query, "q")
    require_dims(query, "q", (3,))
    require_dims(keys, "k", (4,))
    if keys.dtype is torch.uint8:
        rule = "not implemented, expected a cache without block scales"
        raise UnsupportedError(f"k.dtype: {rule}, got {keys.dtype}")
    require(keys.shape[2] == _BLOCK, "k.shape[2]", f"{_BLOCK} (tokens of a block)", keys.shape[2])
    indices = require_tensor(q2k_indices, "q2k_indices")
    require_dims(indices, "q2k_indices", (3,))
    count = indices.shape[-1]
    require(count <= _MAX_INDICES, "q2k_indices.shape[-1]", f"{_MAX_INDICES} or less", count)
    args = GqaArgs(
        query=query,
        key_cache=keys,
        value_cache=require_tensor(v, "v"),
        workspace_buffer=query.new_empty(0),
        block_tables=require_tensor(page_table, "page_table"),
        seq_lens=require_tensor(seqused_k, "seqused_k"),
        max_seq_len=0,
        q_len=require_whole_number(seqlen_q, "seqlen_q", min_value=1),
        kv_layout="HND",
        out=out,
        is_out_like_query=True,
        lse=lse,
        return_lse=require_flag(return_softmax_lse, "return_softmax_lse"),
        return_lse_base="basee",
        bmm1_scale=_score_scale(query, softmax_scale, k_global_scale),
        bmm2_scale=1.0 if v_global_scale is None else v_global_scale,
        block_indices=indices,
        sparse_block=_BLOCK,
        batch_invariant=chooses_batch_invariant(batch_invariant),
        names=_NAMES,
    )
    return with_scratch(args)


def _reject_unserved(
    cu_seqlens_k: object, causal: object, k_scale: object, v_scale: object, q_offset: object
) -> None:
    """Reject what no kernel implements."""
    given = {"cu_seqlens_k": cu_seqlens_k, "k_scale": k_scale, "v_scale": v_scale}
    for name, value in {**given, "q_offset": q_offset}.items():
        reject_unserved(name, value, None)
    reject_unserved("causal", require_flag(causal, "causal"), True)


def _score_scale(query: torch.Tensor, softmax_scale: Any, k_global_scale: Any) -> float:
    """Return the factor of the scores."""
    scale: float = query.shape[-1] ** -0.5
    if softmax_scale is not None:
        scale = require_float32(softmax_scale, "softmax_scale")
    return scale * factor_of(k_global_scale, "k_global_scale")
