"""MLA decoding by the signature of Modular's ``flare_mla_decoding``, with any of its masks."""

from __future__ import annotations

import torch

from mlagen.api.arguments import (
    INT32_MAX,
    reject,
    require,
    require_contiguous,
    require_device,
    require_dims,
    require_dtype,
    require_flag,
    require_shape,
    require_tensor,
    require_whole_number,
)
from mlagen.api.memory import require_memory
from mlagen.api.mla_args import MlaArgs
from mlagen.api.mla_call import run_mla
from mlagen.api.mla_numbers import with_plain_numbers
from mlagen.api.mla_problem import check_problem
from mlagen.api.traced import is_compiling, is_traced
from mlagen.mla.flare_kv import (
    Keys,
    PagedKVCache,
    dense_keys,
    form_of_keys,
    paged_keys,
    positions_of,
)
from mlagen.mla.flare_op import call_op, define_op
from mlagen.mla.flare_q import padded_queries, ragged_queries
from mlagen.mla.masks import CausalMask, Mask, NullMask, form_of_bias
from mlagen.runtime.device import device_facts

__all__ = ["PagedKVCache", "flare_mla_decoding"]

_LATENT_DIM, _ROPE_DIM = 512, 64

# Tables and masks of more positions than these cost more than to check a call without them first.
_MAX_UNCHECKED = 1 << 16

# No plan asks for more: partial rows and their LSE, of 64 rows for each SM in each of the four
# waves that work is split into at the most.
_WORKSPACE_BYTES_PER_SM = 4 * 64 * (_LATENT_DIM + 1) * 4


def flare_mla_decoding(
    q: torch.Tensor,
    k: torch.Tensor | PagedKVCache,
    mask: Mask,
    valid_length: torch.Tensor | None,
    scale: float,
    *,
    output: torch.Tensor | None = None,
    ragged: bool = False,
    num_partitions: int | None = None,
    q_scale: torch.Tensor | None = None,
    per_token_scale_rope_aware: bool = False,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode the new tokens of every request against all its tokens.

    A row that sees nothing gives zeros, and so does one of padding. Masks other than
    :class:`NullMask` and :class:`CausalMask` are written out, 4 bytes for every query token and
    every position that the block table has room for, heads sharing them. Nothing waits for the
    device. A length that cannot be, in ``k.cache_lengths`` or in ``valid_length`` of padded
    requests, is read as the nearest that can, and rejected with ``MLAGEN_CHECK=1``. Tensors on the
    CPU are computed by a slow backend in plain torch.

    Parameters
    ----------
    q : bf16, fp16 or e4m3 [batch, q_len, heads, 576], or [tokens, heads, 576] if ``ragged``
        Absorbed queries, latent part first. 1 to 256 heads. With ``per_token_scale_rope_aware``
        rows of 640 bytes, e4m3 or uint8: 512 e4m3 elements and 64 of bf16.
    k : PagedKVCache, or as q [batch, num_keys, 1, 576]
        The tokens of each request, the first 512 elements of one its value too. The second form
        holds the new tokens as the last of ``num_keys``; it is read through a table of its rows
        that each call makes.
    mask : Mask
        What of its request a token sees; see :mod:`mlagen.mla.masks`.
    valid_length : int32 or uint32 [batch]
        How many of the ``q_len`` tokens of each request there are; the rest is padding. None means
        all of them, for dense ``k`` only. If ``ragged`` ``[batch + 1]``, where those of each begin.
    scale : float
        Multiplies the scores before the mask, whole. Natural domain.
    output : [..., heads, 512]
        Written and returned, contiguous; made if None. Of the query's dtype, bf16 for e4m3.
    ragged : bool
        Whether requests are given without padding.
    num_partitions : int
        Not used; a hint on how many parts to split the keys into, 1 or more.
    q_scale : fp32 [tokens]
        What the rows of each query token are multiplied by, with ``per_token_scale_rope_aware``;
        None stands for 1. ``[batch, q_len]`` too where there is padding.
    per_token_scale_rope_aware : bool
        Whether rows are of 640 bytes, with a scale for each token that multiplies its rope part
        and its value too.
    kv_scales : fp32 [batch, num_keys], or with axes of size 1 behind
        The scales of dense ``k``.

    Returns
    -------
    torch.Tensor
        ``output``.

    Raises
    ------
    ArgumentError
        If an argument breaks a rule; nothing has been launched or written then.
    UnsupportedError
        If no kernel covers the dtypes.
    CaptureError
        If the kernel is not loaded yet and a CUDA graph is being captured.

    Notes
    -----
    Signature after ``flare_mla_decoding`` of Modular's ``nn.mla``, whose context, buffer of scalars
    and unused offsets have no counterpart here.
    """
    if is_compiling() or is_traced():
        rare = (num_partitions, q_scale, per_token_scale_rope_aware, kv_scales)
        return call_op(q, k, mask, valid_length, scale, output, ragged, *rare)
    ragged = require_flag(ragged, "ragged")
    is_packed = require_flag(per_token_scale_rope_aware, "per_token_scale_rope_aware")
    others = {"valid_length": valid_length, "output": output}
    _check_memory(q, k, mask, **others, q_scale=q_scale, kv_scales=kv_scales)
    require_dims(require_tensor(q, "q"), "q", (3,) if ragged else (4,))
    require(isinstance(mask, Mask), "mask", "a mask of mlagen.mla", type(mask).__name__)
    if num_partitions is not None:
        require_whole_number(num_partitions, "num_partitions", least=1)
    if output is not None:
        require_shape(require_tensor(output, "output"), "output", ((*q.shape[:-1], _LATENT_DIM),))
        require_contiguous(output, "output")

    def args_of(keys: Keys, *, is_form: bool) -> MlaArgs:
        require_device(keys.blocks, keys.names.kv_cache, q.device)
        if is_packed and keys.scales is None:
            reject(keys.names.kv_scales, "a tensor with per_token_scale_rope_aware", None)
        needs_rows = not isinstance(mask, (NullMask, CausalMask))
        find = ragged_queries if ragged else padded_queries
        queries = find(q, keys, valid_length, needs_rows=needs_rows and not is_form)
        bias = None if queries.rows is None else mask.bias(queries.rows)
        if needs_rows and is_form:
            bias = form_of_bias(mask, q, keys.block_table.shape[0])
        return MlaArgs(
            query=queries.query,
            kv_cache=keys.blocks,
            workspace_buffer=_workspace(q.device),
            kv_lora_rank=_LATENT_DIM,
            qk_rope_head_dim=_ROPE_DIM,
            block_tables=queries.block_table,
            seq_lens=queries.seq_lens,
            max_seq_len=0 if is_form else min(keys.width, INT32_MAX),
            out=None if output is None else output.view(*queries.query.shape[:-1], _LATENT_DIM),
            bmm1_scale=scale,
            cum_seq_lens_q=queries.ends,
            max_q_len=queries.max_q_len,
            is_causal=isinstance(mask, CausalMask),
            query_scales=None if q_scale is None else _flat_scales(q_scale),
            kv_scales=keys.scales,
            bias=bias,
            is_fp8_per_token=is_packed,
            names=keys.names,
        )

    if positions_of(k) > _MAX_UNCHECKED:
        form = args_of(form_of_keys(k, kv_scales), is_form=True)
        check_problem(with_plain_numbers(form))
    keys = paged_keys(k, kv_scales) if isinstance(k, PagedKVCache) else dense_keys(k, kv_scales)
    result, _ = run_mla(args_of(keys, is_form=False), enable_pdl=True)
    return output if output is not None else result.view(*q.shape[:-1], _LATENT_DIM)


define_op(flare_mla_decoding)


def _check_memory(q: object, k: object, mask: object, **others: object) -> None:
    """Reject tensors that are not in memory, before anything is computed of them."""
    require_memory(q, "q")
    for name, whole in (("k", k), ("mask", mask)):
        if isinstance(whole, torch.Tensor):
            require_memory(whole, name)
        elif isinstance(whole, (PagedKVCache, Mask)):
            for part, tensor in vars(whole).items():
                if isinstance(tensor, torch.Tensor):
                    require_memory(tensor, f"{name}.{part}")
    for name, other in others.items():
        if other is not None:
            require_memory(other, name)


def _flat_scales(q_scale: torch.Tensor) -> torch.Tensor:
    scales = require_tensor(q_scale, "q_scale")
    require_dtype(scales, "q_scale", (torch.float32,))
    require_contiguous(scales, "q_scale")
    return scales.flatten()


def _workspace(device: torch.device) -> torch.Tensor:
    size = 0
    if device.type == "cuda":
        size = device_facts(device.index).sm_count * _WORKSPACE_BYTES_PER_SM
    return torch.empty(size, dtype=torch.uint8, device=device)
