"""The torch ops of the entry points, ``torch.ops.mlagen``, for programs that name them themselves.

Importing this module defines them all. Compiled code takes them by itself: every entry point is its
op while ``torch.compile``, ``torch.export`` or a tracing mode looks at it. A package of AOTInductor
or an exported program that is loaded in another process needs this import there.

An op has the parameters of its entry point, without the workspace and the outputs. A scale is a
float, and ``..._tensor`` in its place where it is a tensor; a pair of caches is a list. Of two ops,
one makes its outputs, and ``..._out`` writes into ``out``, and ``lse`` where there is one. Ops that
can return an LSE always return two tensors, the second of them empty without ``return_lse``.
"""

from __future__ import annotations

import torch

from mlagen import decode, mla, xqa

__all__ = ["NAMES", "op"]

NAMES = (
    mla.trtllm_batch_decode_with_kv_cache_mla.__name__,
    mla.xqa_batch_decode_with_kv_cache_mla.__name__,
    decode.xqa_batch_decode_with_kv_cache.__name__,
    xqa.xqa.__name__,
    xqa.xqa_mla.__name__,
    mla.flare_mla_decoding.__name__,
    "batch_mla_run",
    "batch_mla_run_planless",
)


def op(name: str, *, writes: bool = False) -> torch._ops.OpOverload:
    """Return the op of an entry point.

    Parameters
    ----------
    name : str
        One of ``mlagen.ops.NAMES``.
    writes : bool
        Whether it writes into a given ``out``, instead of making one.

    Returns
    -------
    torch._ops.OpOverload
        ``torch.ops.mlagen.NAME.default``, or ``NAME_out``.
    """
    found: torch._ops.OpOverload = getattr(
        torch.ops.mlagen, f"{name}_out" if writes else name
    ).default
    return found
