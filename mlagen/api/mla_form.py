"""What an MLA decode call is remembered by: all that a check or a plan may depend on."""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_

from mlagen.api.calls import facts_of, length_form, rounded_up
from mlagen.api.mla_inputs import MlaInputs


def form_of(inputs: MlaInputs, kernel: str, probabilities: str) -> Hashable:
    """Return everything about the arguments that a check or a plan may depend on.

    ``kernel`` and ``probabilities`` are what the settings ask for. Written out, for it runs at
    every call. None if something is not of the kind it should be, which
    :func:`mlagen.api.mla_request.check_request` then says.
    """
    query, cache, workspace, rank, rope_dim, tables, seq_lens, longest = inputs[:8]
    out, bmm1, bmm2, sinks, lse, return_lse, lse_base, ends, max_q_len = inputs[8:17]
    try:
        return (
            kernel,
            probabilities,
            (query.shape, query.stride(), query.dtype, query.get_device()),
            (cache.shape, cache.stride(), cache.dtype, cache.get_device()),
            (workspace.shape, workspace.stride(), workspace.dtype, workspace.get_device()),
            # The classes, for a float or a bool that equals an int is none.
            (rank, rank.__class__, rope_dim, rope_dim.__class__),
            (tables.shape, tables.stride(), tables.dtype, tables.get_device()),
            (seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.get_device()),
            rounded_up(longest) if longest.__class__ is int else length_form(longest),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
            float if bmm1.__class__ is float else facts_of(bmm1),
            float if bmm2.__class__ is float else facts_of(bmm2),
            None if sinks is None else facts_of(sinks),
            (return_lse, lse_base, None if lse is None else facts_of(lse)),
            None if ends is None else facts_of(ends),
            None if max_q_len is None else (max_q_len, max_q_len.__class__),
            None if _has_defaults(inputs[17:]) else _rare_form(inputs),
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


_DEFAULTS = tuple(MlaInputs._field_defaults.values())[-len(MlaInputs._fields[17:]) : -1]


def _has_defaults(rare: tuple[object, ...]) -> bool:
    """Whether everything that few calls use is left out: the very objects that stand for that.

    A comparison would ask a tensor whether it equals a number, and wait for the answer.
    """
    return all(map(is_, rare, _DEFAULTS))


def _rare_form(inputs: MlaInputs) -> Hashable:
    """Return the part of the form that few calls have."""
    top_k, bias = inputs.top_k, inputs.bias
    tensors = (
        inputs.top_k_lens,
        inputs.query_rope,
        inputs.query_scales,
        inputs.rope_cache,
        inputs.value_cache,
        inputs.kv_scales,
        inputs.table_starts,
        bias,
    )
    return (
        (top_k, top_k.__class__, bool(inputs.is_causal), bool(inputs.scores_take_bmm2)),
        bool(inputs.is_packed640),
        tuple(None if tensor is None else facts_of(tensor) for tensor in tensors),
        (_is_one(inputs.latent_scale), _is_one(inputs.rope_scale)),  # others are for few dtypes
        None if bias is None else inputs.max_seq_len,  # which a bias must cover
    )


def _is_one(scale: object) -> Hashable:
    return type(scale).__name__, isinstance(scale, float) and scale == 1.0
