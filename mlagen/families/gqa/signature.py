"""The call signature of grouped-query decode: everything that a check or a plan may depend on."""

from __future__ import annotations

from collections.abc import Hashable

from mlagen.families.common.launchers import length_signature, rounded_up, tensor_signature
from mlagen.families.gqa.args import GqaArgs


def call_signature(args: GqaArgs, kernel: str) -> Hashable:
    """Return everything about the arguments that a check or a plan may depend on.

    ``kernel`` is the one that the settings request. The tuple is written out because every call off
    the fast path builds it. None if an argument has the wrong type, which
    :func:`mlagen.families.gqa.problem.check_problem` then rejects.
    """
    query, key, value, workspace, tables, seq_lens, max_len = args[:7]
    q_len, layout, window, out, bmm1_scale, bmm2_scale, factor_16bit, factor_e4m3 = args[7:15]
    sinks, mask, cu_seqlens_q, key_scales, value_scales, with_beam_axis, like_xqa, _ = args[15:]
    try:
        return (
            kernel,
            (query.shape, query.stride(), query.dtype, query.get_device()),
            (key.shape, key.stride(), key.dtype, key.get_device()),
            None
            if value is None
            else (value.shape, value.stride(), value.dtype, value.get_device()),
            (workspace.shape, workspace.stride(), workspace.dtype, workspace.get_device()),
            (tables.shape, tables.stride(), tables.dtype, tables.get_device()),
            (seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.get_device()),
            rounded_up(max_len) if max_len.__class__ is int else length_signature(max_len),
            # The type too: a float or a bool may equal an int.
            (q_len, q_len.__class__, layout, window, with_beam_axis, like_xqa),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            float if bmm1_scale.__class__ is float else tensor_signature(bmm1_scale),
            float if bmm2_scale.__class__ is float else tensor_signature(bmm2_scale),
            (factor_16bit.__class__, factor_e4m3.__class__),
            None if sinks is None else tensor_signature(sinks),
            None if mask is None else tensor_signature(mask),
            None if cu_seqlens_q is None else tensor_signature(cu_seqlens_q),
            None
            if key_scales is None
            else (tensor_signature(key_scales), tensor_signature(value_scales)),
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
