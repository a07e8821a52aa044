"""Which kernel serves an MLA decode call, and how the call is spread over its GPU."""

from __future__ import annotations

from functools import lru_cache

import torch

from mlagen.api.arguments import DTYPES
from mlagen.runtime.device import arch_of_device, device_facts
from mlagen.runtime.plan import MlaDecodePlan, MlaDecodeProblem, plan_mla_decode
from mlagen.spec.mla import MlaDecodeSpec, mla_decode_spec


def workspace_bytes(
    *,
    batch: int,
    q_len: int,
    heads: int,
    max_seq_len: int,
    dtype: torch.dtype = torch.bfloat16,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    page_size: int = 64,
    device: torch.device | int = 0,
) -> int:
    """Return the bytes of ``workspace_buffer`` that an MLA decode call of this size needs.

    A larger batch may need fewer. No call needs more than 513 KiB for each SM of the GPU.

    Parameters
    ----------
    batch, q_len, heads, max_seq_len : int
        As in the call; for ragged queries ``q_len`` is the longest.
    dtype : torch.dtype
        Of query and cache.
    kv_lora_rank, qk_rope_head_dim, page_size : int
        As in the call, and of its cache.
    device : torch.device or int
        The GPU that will run it.

    Raises
    ------
    ArgumentError
        If there is no such GPU.
    UnsupportedError
        If no kernel covers such a call.
    """
    index = device if isinstance(device, int) else (device.index or 0)
    _, plan = plan_call(
        device=index,
        dtype=dtype,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        page_size=page_size,
        batch=batch,
        q_len=q_len,
        tokens=batch * q_len,
        heads=heads,
        max_seq_len=max_seq_len,
    )
    return plan.workspace_bytes


@lru_cache(maxsize=4096)
def plan_call(
    *,
    device: int,
    dtype: torch.dtype,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    page_size: int,
    batch: int,
    q_len: int,
    tokens: int,
    heads: int,
    max_seq_len: int,
) -> tuple[MlaDecodeSpec, MlaDecodePlan]:
    """Return the kernel and the plan of a call on GPU ``device``."""
    spec = mla_decode_spec(
        arch=arch_of_device(device),
        query_dtype=DTYPES[dtype],
        kv_dtype=DTYPES[dtype],
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        page_size=page_size,
        rows=q_len * heads,
    )
    problem = MlaDecodeProblem(
        batch=batch,
        q_len=q_len,
        heads=heads,
        total_rows=tokens * heads,
        longest_kv=rounded_up(max_seq_len),
    )
    return spec, plan_mla_decode(spec, problem, device_facts(device).sm_count)


def rounded_up(length: int) -> int:
    """Return the next number of four leading bits.

    Plans are made for such lengths, so that the plan of a growing batch changes now and then and
    not at every step.
    """
    if length < 16:
        return length
    step = 1 << (length.bit_length() - 4)
    return -(-length // step) * step
