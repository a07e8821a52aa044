"""The torch ops of the entry points, ``torch.ops.mlagen``, for direct use.

Importing this module defines them all. Compiled code uses them implicitly: under ``torch.compile``,
``torch.export`` or a tracing mode every entry point calls its op. A process that loads an
AOTInductor package or an exported program must import this module.

An op has the parameters of its entry point, without the workspace and the outputs. A scale is a
float, or a tensor in ``..._tensor``, which overrides it; a pair of caches is a list. Each entry
point has a functional op and an out variant, ``..._out``, that writes into ``out``, and into
``lse`` where there is one. Ops that can return an LSE always return two tensors; the second is
empty without ``return_lse``, and that of ``xqa`` is always computed.
"""

from __future__ import annotations

import torch

from mlagen import decode, mla, msa_ops, sparse, xqa
from mlagen.families.common.arguments import require_choice, require_flag

__all__ = ["NAMES", "op"]

NAMES = (
    mla.trtllm_batch_decode_with_kv_cache_mla.__name__,
    mla.trtllm_batch_decode_sparse_mla_dsv4.__name__,
    mla.xqa_batch_decode_with_kv_cache_mla.__name__,
    decode.xqa_batch_decode_with_kv_cache.__name__,
    decode.trtllm_batch_decode_with_kv_cache.__name__,
    msa_ops.msa_sparse_decode_attention.__name__,
    sparse.qsa_sparse_paged_attention.__name__,
    xqa.xqa.__name__,
    xqa.xqa_mla.__name__,
    mla.flare_mla_decoding.__name__,
    "batch_mla_run",
    "batch_decode_run",
)


def op(name: str, *, writes: bool = False) -> torch._ops.OpOverload:
    """Return the op of an entry point.

    Parameters
    ----------
    name : str
        One of ``mlagen.ops.NAMES``.
    writes : bool
        Whether to return the out variant, which writes into a given ``out``.

    Returns
    -------
    torch._ops.OpOverload
        ``torch.ops.mlagen.NAME.default``, or ``NAME_out``.

    Raises
    ------
    ArgumentError
        If ``name`` is none of them, or ``writes`` is no bool.
    """
    known = require_choice(name, "name", NAMES)
    suffix = "_out" if require_flag(writes, "writes") else ""
    found: torch._ops.OpOverload = getattr(torch.ops.mlagen, f"{known}{suffix}").default
    return found
