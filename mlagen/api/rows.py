"""What both CPU backends share: ends of queries, decoded rows, and softmax, in plain torch."""

from __future__ import annotations

import math

import torch

from mlagen.spec.dtype import DType

# Where the parts of a packed row begin; see :class:`DType` for what they hold.
_LATENT_BYTES = 512
_SCALES_BYTES = 16
_SCALE_ELEMENTS = 128

_TORCH_DTYPES = {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.E4M3: torch.float8_e4m3fn,
}


def query_ends(ends: torch.Tensor | None, batch: int, q_len: int) -> list[int]:
    """Return where the query tokens of each request begin, and where the last ones end."""
    if ends is not None:
        return [int(end) for end in ends]
    return [index * q_len for index in range(batch + 1)]


def stored_rows(cache: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the bytes of some tokens ``[n, row bytes]`` of ``cache[pages, page_size, width]``."""
    return cache.view(torch.uint8)[pages, slots].contiguous()


def decoded(rows: torch.Tensor, dtype: DType) -> torch.Tensor:
    """Return the elements ``[n, d]`` that the bytes ``rows[n, row bytes]`` stand for.

    Of a packed 640-byte row, and of e4m3, without the scales that are kept elsewhere.
    """
    if dtype is DType.FP8_DS_MLA:
        scales = _part(rows, _LATENT_BYTES, _LATENT_BYTES + _SCALES_BYTES, torch.float32)
        latent = scaled_groups(_part(rows, 0, _LATENT_BYTES, torch.float8_e4m3fn), scales)
        rope = _part(rows, _LATENT_BYTES + _SCALES_BYTES, rows.shape[-1], torch.bfloat16)
        return torch.cat([latent, rope.float()], dim=-1)
    if dtype is DType.FP8_PER_TOKEN:
        latent = _part(rows, 0, _LATENT_BYTES, torch.float8_e4m3fn).float()
        rope = _part(rows, _LATENT_BYTES, rows.shape[-1], torch.bfloat16).float()
        return torch.cat([latent, rope], dim=-1)
    return rows.view(_TORCH_DTYPES[dtype]).float()


def scaled_groups(latent: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return ``latent[n, d]`` with every 128 elements times their one of ``scales[n, 4]``."""
    return latent.float() * scales.repeat_interleave(_SCALE_ELEMENTS, dim=-1)[:, : latent.shape[1]]


def softmax_with_sinks(
    scores: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of ``scores[..., n]``, and the natural LSE with ``sinks[...]`` included.

    The LSE of a row without a score is its sink, or minus infinity; its weights have no meaning.
    """
    if sinks is None:
        sinks = scores.new_full(scores.shape[:-1], -math.inf)
    sinks = sinks[..., None]
    logits = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :-1]
    # An infinite sink takes all weight; softmax would subtract infinity from itself.
    weights = torch.where(sinks == math.inf, (scores - sinks).exp(), weights)
    return weights, torch.logsumexp(logits, dim=-1)


def _part(rows: torch.Tensor, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    return rows[..., first:end].contiguous().view(dtype)
