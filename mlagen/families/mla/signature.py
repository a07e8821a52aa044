"""The call signature of MLA decode: everything that a check or a plan may depend on."""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_

from mlagen.families.common.launchers import length_signature, rounded_up, tensor_signature
from mlagen.families.mla.args import MlaArgs


def call_signature(args: MlaArgs, kernel: str, p_dtype_choice: str) -> Hashable:
    """Return everything about the arguments that a check or a plan may depend on.

    ``kernel`` and ``p_dtype_choice`` are those that the settings request. The tuple is written out
    because every call off the fast path builds it. None if an argument has the wrong type, which
    :func:`mlagen.families.mla.problem.check_problem` then rejects.
    """
    query, cache, workspace, rank, rope_dim, tables, seq_lens, max_len = args[:8]
    out, bmm1, bmm2, sinks, lse, return_lse, lse_base, cu_seqlens_q, max_q_len = args[8:17]
    try:
        return (
            kernel,
            p_dtype_choice,
            (query.shape, query.stride(), query.dtype, query.get_device()),
            (cache.shape, cache.stride(), cache.dtype, cache.get_device()),
            (workspace.shape, workspace.stride(), workspace.dtype, workspace.get_device()),
            # The types too: a float or a bool may equal an int.
            (rank, rank.__class__, rope_dim, rope_dim.__class__),
            (tables.shape, tables.stride(), tables.dtype, tables.get_device()),
            (seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.get_device()),
            rounded_up(max_len) if max_len.__class__ is int else length_signature(max_len),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            float if bmm1.__class__ is float else tensor_signature(bmm1),
            float if bmm2.__class__ is float else tensor_signature(bmm2),
            None if sinks is None else tensor_signature(sinks),
            (return_lse, lse_base, None if lse is None else tensor_signature(lse)),
            None if cu_seqlens_q is None else tensor_signature(cu_seqlens_q),
            None if max_q_len is None else (max_q_len, max_q_len.__class__),
            None if _has_defaults(args[17:]) else _rare_signature(args),
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


_DEFAULTS = tuple(MlaArgs._field_defaults.values())[-len(MlaArgs._fields[17:]) : -1]


def _has_defaults(rare: tuple[object, ...]) -> bool:
    """Whether all rare arguments are the default objects themselves.

    A comparison by value would compare a tensor with a number and synchronize with the device.
    """
    return all(map(is_, rare, _DEFAULTS))


def _rare_signature(args: MlaArgs) -> Hashable:
    """Return the part of the signature that few calls use."""
    top_k, bias = args.top_k, args.bias
    tensors = (
        args.top_k_lens,
        args.query_rope,
        args.query_scales,
        args.rope_cache,
        args.value_cache,
        args.kv_scales,
        args.kv_indptr,
        bias,
    )
    return (
        (top_k, top_k.__class__, bool(args.is_causal), bool(args.scores_take_bmm2)),
        bool(args.is_fp8_per_token),
        tuple(None if tensor is None else tensor_signature(tensor) for tensor in tensors),
        (_is_one(args.latent_scale), _is_one(args.rope_scale)),  # few dtypes support others
        None if bias is None else args.max_seq_len,  # a bias must cover it
    )


def _is_one(scale: object) -> Hashable:
    return type(scale).__name__, isinstance(scale, float) and scale == 1.0
