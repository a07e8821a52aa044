"""Paged MLA decode by the signature of TensorRT-LLM in ``flashinfer.mla``."""

from __future__ import annotations

import torch

from mlagen.api.arguments import plain_pdl, require_flag
from mlagen.api.call_cache import FastPathKey
from mlagen.api.calls import rounded_up
from mlagen.api.mla_args import MlaArgs
from mlagen.api.mla_call import MlaCall, run_mla, try_replay
from mlagen.api.op_outputs import mla_outputs
from mlagen.api.traced import as_op, is_compiling, is_traced, traceable
from mlagen.mla.trtllm_keywords import (
    AUTO,
    CP_RANK,
    CP_WORLD,
    SYNONYMS,
    check_counter_buffer,
    half_of,
    one_tensor,
    rare_keywords,
    separate_values,
)


@traceable(mla_outputs, has_lse=True)
def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor | None,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    sparse_mla_top_k_lens: torch.Tensor | None = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: torch.Tensor | None = None,
    use_fp16_softmax: bool | None = None,
    return_lse_base: str | None = "base2",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Decode one step of multi-head latent attention over a paged cache.

    The kernel is compiled at the first call of a machine and read from the cache after. Query token
    ``i`` of ``q_len`` sees the cached tokens ``0 .. seq_len - q_len + i``. A row that sees nothing
    gives zeros, and the LSE of its sink, minus infinity without one. Tensors on the CPU are
    computed by a slow backend in plain torch, with the same checks. Nothing waits for the device.

    Parameters
    ----------
    query : bf16, fp16 or e4m3 [batch, q_len, heads, head_dim_qk], or [tokens, heads, head_dim_qk]
        Absorbed queries, latent part first; ``head_dim_qk = kv_lora_rank + qk_rope_head_dim``. The
        second form goes with ``cum_seq_lens_q``. 1 to 256 heads.
    kv_cache : [pages, page_size, head_dim_qk]
        The paged latent cache, of the query's dtype, or e4m3 under a query of 16 bits; an axis of
        size 1 before or after ``page_size`` is accepted. The first ``kv_lora_rank`` elements of a
        token are its value too. Any page size, and any strides that are whole 16 bytes. Of uint8
        and width 656, under a query of 16 bits: packed rows of 512 e4m3, 4 fp32 scales for 128
        of them each, and 64 bf16.
    workspace_buffer : any dtype
        Scratch of at least :func:`mlagen.workspace_bytes` bytes, of which a call uses the last. It
        needs no initial value.
    qk_nope_head_dim : int
        Not used; the dimension before absorption.
    kv_lora_rank, qk_rope_head_dim : int
        The two parts of ``head_dim_qk``.
    block_tables : int32 or uint32 [batch, max_pages]
        Page ids; entries at ``ceil(seq_len / page_size)`` and after are never read. What a request
        gives whose id before that is no page of the cache is not specified. ``[batch, 2,
        max_pages]``, of keys and of values, without ``uses_shared_paged_kv_idx``. With
        ``sparse_mla_top_k`` token indices ``page * page_size + slot``, exactly ``[batch, q_len,
        sparse_mla_top_k]`` or ``[tokens, sparse_mla_top_k]``.
    seq_lens : int32 or uint32 [batch]
        Tokens in the cache, the ``q_len`` new ones included. None with ``sparse_mla_top_k`` only:
        query tokens look at all of their lists, and one small kernel writes lengths that say so.
        See ``backend`` for what else they may be.
    max_seq_len : int
        The longest of ``seq_lens``. It decides how the work is split, not what is computed.
    sparse_mla_top_k : int
        How many tokens each query token lists; 0 for all tokens. A query token looks at the first
        ``min(number it would see, sparse_mla_top_k)`` of its list, in which an index that is no
        token of the cache is skipped and a repeated one counts again.
    out : [..., heads, kv_lora_rank]
        Written and returned; made if None. Of the query's dtype, bf16 for e4m3. ``[batch, heads,
        kv_lora_rank]`` too where q_len is 1. Of bf16 under an fp16 query too: the result in fp16 is
        copied to it.
    bmm1_scale : float or fp32 tensor of one element
        Multiplies the scores before softmax, whole: e.g. ``192 ** -0.5`` for DeepSeek-V3, times
        what e4m3 elements are to be multiplied by. Natural domain; no factor of log2(e). Infinity
        and NaN do to the result what arithmetic says; a float beyond float32 is rejected.
    bmm2_scale : float or fp32 tensor of one element
        Multiplies the output.
    sinks : fp32, bf16 or fp16 [heads]
        Natural-domain logits that join the denominator, unscaled, and have no value, of any size:
        minus infinity is as none, infinity gives zeros. A list of one such tensor is accepted.
        Those of 16 bits are converted to fp32 at every call, by one small kernel.
    skip_softmax_threshold_scale_factor : float
        Changes nothing: no block of tokens is left out, and the result is exact.
    enable_pdl : bool
        Whether the kernel may start while the one before it drains; None means yes where the GPU
        can. The blocks of a sm90 kernel wait for each other, so all begin together, when there
        is room for all.
    backend : str
        ``auto``, ``xqa``, ``trtllm-gen`` and ``cute-dsl`` are names of the same semantics. With
        ``sparse`` the cache has packed rows, and ``seq_lens`` says how many of its list each query
        token looks at: ``[batch, q_len]`` or ``[batch * q_len]``. None, and ``[batch]`` where q_len
        is above 1, mean all ``sparse_mla_top_k``.
    is_var_seq : bool
        Not used; a scheduling hint elsewhere.
    uses_shared_paged_kv_idx : bool
        Whether keys and values lie in the same pages; see ``block_tables``.
    lse : fp32 [tokens, heads] or [batch, q_len, heads]
        Written and returned if ``return_lse``; made if None.
    return_lse : bool
        Whether to return ``(out, lse)``: the logarithm of the softmax denominator, sink included.
    cute_dsl_impl : str
        ``auto``, ``modular`` or ``monolithic``; changes nothing.
    kv_scale_format : str
        ``auto``, ``pow2_fp32`` or ``arbitrary_fp32``, in any case; changes nothing: scales of
        packed rows may be any numbers.
    cum_seq_lens_q : int32 or uint32 [batch + 1]
        Where the query tokens of each request begin, for requests of different ``q_len``. What
        query tokens give that belong to no request is not specified.
    max_q_len : int
        The longest ``q_len``, as a hint; None will do.
    multi_ctas_kv_counter_buffer : torch.Tensor
        Not used; may be of any size and content on the device of the query, and is left as it is.
    sparse_mla_top_k_lens : int32 or uint32 [tokens]
        How many of its list each query token looks at, instead of what ``seq_lens`` says.
    enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global
        Not implemented; their defaults are accepted.
    use_fp16_softmax : bool
        Changes nothing: the softmax is computed in fp32.
    return_lse_base : str
        ``base2`` or ``basee``: log2 or natural logarithm; None means ``base2``.

    Returns
    -------
    torch.Tensor
        ``out``, or ``(out, lse)``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing has been launched or written then.
    UnsupportedError
        If no kernel covers dtype, dimensions or form, or ``enable_dcp`` or a companion of it asks
        for what is not implemented.
    CaptureError
        If the kernel is not loaded yet and a CUDA graph is being captured.

    Notes
    -----
    Signature of ``flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla``, in both positional orders
    of ``enable_pdl`` and ``backend`` that it has had. Pass everything after ``sinks`` by keyword.
    """
    if is_compiling() or is_traced():
        first = (query, kv_cache, workspace_buffer, qk_nope_head_dim, kv_lora_rank)
        second = (qk_rope_head_dim, block_tables, seq_lens, max_seq_len, sparse_mla_top_k, out)
        third = (bmm1_scale, bmm2_scale, sinks, skip_softmax_threshold_scale_factor, enable_pdl)
        fourth = (backend, is_var_seq, uses_shared_paged_kv_idx, lse, return_lse, cute_dsl_impl)
        fifth = (kv_scale_format, cum_seq_lens_q, max_q_len, multi_ctas_kv_counter_buffer)
        sixth = (sparse_mla_top_k_lens, enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global)
        seventh = (use_fp16_softmax, return_lse_base)
        rest = (*third, *fourth, *fifth, *sixth, *seventh)
        name = "trtllm_batch_decode_with_kv_cache_mla"
        return as_op(name, *first, *second, *rest)  # type: ignore[no-any-return]
    if multi_ctas_kv_counter_buffer is not None:
        check_counter_buffer(multi_ctas_kv_counter_buffer, query)
    if (  # is the very object asked for? What merely equals it may be an array.
        skip_softmax_threshold_scale_factor is not None
        or (enable_pdl is not None and enable_pdl.__class__ is not bool)
        or backend.__class__ is not str
        or backend not in SYNONYMS
        or cute_dsl_impl is not AUTO
        or kv_scale_format is not AUTO
        or use_fp16_softmax is not None
        or enable_dcp is not False
        or cp_world is not CP_WORLD
        or cp_rank is not CP_RANK
        or causal_seqlens_kv_global is not None
        or seq_lens is None
    ):
        enable_pdl, seq_lens, sparse_mla_top_k_lens = rare_keywords(dict(locals()))
    fast_path: FastPathKey[MlaCall] | None = None
    if (
        sinks is cum_seq_lens_q is sparse_mla_top_k_lens is lse is None
        and max_q_len is None
        and uses_shared_paged_kv_idx is True
        and return_lse is False
        and return_lse_base.__class__ is str
        # The exact classes, for a float or a bool that equals an int is none.
        and max_seq_len.__class__ is sparse_mla_top_k.__class__ is int
        and kv_lora_rank.__class__ is qk_rope_head_dim.__class__ is int
        and bmm1_scale.__class__ is bmm2_scale.__class__ is float
        and (enable_pdl is None or enable_pdl.__class__ is bool)
    ):
        tensors: tuple[torch.Tensor, ...] = (
            query,
            kv_cache,
            workspace_buffer,
            block_tables,
            seq_lens,
        )
        if out is not None:
            tensors += (out,)
        dims = (kv_lora_rank, qk_rope_head_dim)
        key = (rounded_up(max_seq_len), *dims, sparse_mla_top_k, return_lse_base, out is None)
        numbers = (bmm1_scale, bmm2_scale)
        found = try_replay(key, tensors, numbers, out, enable_pdl is not False)
        if isinstance(found, torch.Tensor):
            return found
        fast_path = found
    target = half_of(query, out)
    if target is not out:
        fast_path = None  # which would write to out itself
    args = MlaArgs(
        query,
        kv_cache,
        workspace_buffer,
        kv_lora_rank,
        qk_rope_head_dim,
        block_tables,
        seq_lens,
        max_seq_len,
        target,
        bmm1_scale,
        bmm2_scale,
        one_tensor(sinks),
        lse,
        require_flag(return_lse, "return_lse"),
        "base2" if return_lse_base is None else return_lse_base,
        cum_seq_lens_q,
        max_q_len,
        sparse_mla_top_k,
        sparse_mla_top_k_lens,
        value_cache=separate_values(
            kv_cache, block_tables, uses_shared_paged_kv_idx, sparse_mla_top_k
        ),
    )
    result, result_lse = run_mla(args, plain_pdl(enable_pdl), fast_path)
    if target is not out and out is not None:
        result = out.copy_(result)
    return result if result_lse is None else (result, result_lse)
