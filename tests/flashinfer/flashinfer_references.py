"""What FlashInfer's tests compare with, in plain PyTorch, and the NVFP4 formats that they write."""

from __future__ import annotations

import math
from typing import Any

import torch

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_BLOCK = 16  # elements of a scale


_SIZES = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")


class PagedDecode:
    """Grouped-query attention over a paged KV cache, with the plan of FlashInfer's wrappers."""

    positional: tuple[str, ...] = ("indptr", "indices", "last_page_len", *_SIZES)

    def __init__(self, _workspace: torch.Tensor, kv_layout: str = "NHD", **_: Any) -> None:
        self._is_hnd = kv_layout == "HND"
        self._plan: dict[str, Any] = {}

    def plan(self, *args: Any, **plan: Any) -> None:
        """Keep the requests."""
        plan |= dict(zip(self.positional, args, strict=False))
        usual = {
            "indptr": plan.get("paged_kv_indptr"),
            "indices": plan.get("paged_kv_indices"),
            "last_page_len": plan.get("paged_kv_last_page_len"),
        }
        self._plan = usual | plan

    def run(self, query: torch.Tensor, kv_cache: Any, *, return_lse: bool = False, **_: Any) -> Any:
        """Return the output, in the dtype of the query, and its LSE to base 2 where requested."""
        plan = self._plan
        keys, values = kv_cache if isinstance(kv_cache, tuple) else kv_cache.unbind(1)
        if self._is_hnd:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        indptr, last = plan["indptr"].tolist(), plan["last_page_len"].tolist()
        ends = plan["qo_indptr"].tolist() if "qo_indptr" in plan else range(len(indptr))
        out, lse = torch.zeros_like(query), query.new_zeros(query.shape[:2], dtype=torch.float32)
        for index in range(len(indptr) - 1):
            pages = plan["indices"][indptr[index] : indptr[index + 1]].long()
            seq_len = (len(pages) - 1) * keys.shape[1] + last[index]
            rows = slice(ends[index], ends[index + 1])
            tokens = [cache[pages].flatten(0, 1)[:seq_len].float() for cache in (keys, values)]
            found, lse[rows] = self.attend(query[rows].float(), *tokens)
            out[rows] = found.to(query.dtype)
        return (out, lse) if return_lse else out

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and LSE of one request, in fp32."""
        group = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
        scale = self._plan.get("sm_scale") or query.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        if soft_cap := self._plan.get("logits_soft_cap"):
            scores = soft_cap * torch.tanh(scores / soft_cap)
        is_causal = self._plan.get("causal", True)
        window = self._plan.get("window_left", -1)
        own = torch.arange(len(query), device=query.device) + len(keys) - len(query)
        offset = torch.arange(len(keys), device=query.device) - own[:, None]
        hidden = offset > 0 if is_causal else torch.zeros_like(offset, dtype=torch.bool)
        if window >= 0:
            hidden = hidden | (offset < -window)
        scores = scores.masked_fill(hidden, -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return out, scores.logsumexp(-1).T * math.log2(math.e)


class PagedPrefill(PagedDecode):
    """The same with several query tokens."""

    positional = (
        *("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
        *_SIZES,
    )


def single_decode(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    **given: Any,
) -> torch.Tensor:
    """Return the attention of one query token; positions are not rotated."""
    if pos_encoding_mode != "NONE":
        raise NotImplementedError(pos_encoding_mode)
    if kv_layout == "HND":
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
    names = {"sm_scale", "window_left", "logits_soft_cap"}
    attention = PagedDecode(query, kv_layout="NHD")
    attention.plan(**{name: given[name] for name in names & given.keys()})
    tokens = [tensor.to(torch.float32) for tensor in (query[None], keys, values)]
    return attention.attend(*tokens)[0][0].to(query.dtype)


def nvfp4_quantize(
    values: torch.Tensor, global_scale: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two e2m1 elements a byte, and an e4m3 scale for 16 of them, in linear layout."""
    blocks = values.float().reshape(-1, values.shape[-1] // _BLOCK, _BLOCK)
    scales = (blocks.abs().amax(-1) / 6.0 * global_scale).to(torch.float8_e4m3fn)
    factor = global_scale / scales.float().clamp(min=2.0**-9)
    scaled = (blocks * factor[..., None]).reshape(*values.shape)
    table = _E2M1.to(values.device)
    codes = (scaled.abs()[..., None] - table).abs().argmin(-1) | (scaled < 0).int() * 8
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return packed, scales.reshape(*values.shape[:-1], -1).view(torch.uint8)


def nvfp4_to_float(
    packed: torch.Tensor, scales: torch.Tensor, global_scale: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Return the elements, on the CPU as FlashInfer's function does."""
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).int()
    magnitude = _E2M1.to(packed.device)[codes & 7]
    values = torch.where(codes >= 8, -magnitude, magnitude)
    factors = scales.view(torch.float8_e4m3fn).float().repeat_interleave(_BLOCK, dim=-1)
    return (values * factors * global_scale).cpu()


def repeat(tensor: torch.Tensor, pattern: str, *, b: int, m: int) -> torch.Tensor:
    """Return sinks for each batch and query token, the only pattern that tests use."""
    if pattern != "h -> b h m 1":
        raise NotImplementedError(pattern)
    return tensor[None, :, None, None].expand(b, -1, m, 1)


def rearrange(tensor: torch.Tensor, pattern: str, *, b: int) -> torch.Tensor:
    """Return the pages of each request as tokens: the two patterns that tests use."""
    pages, _, wanted = pattern.partition(" -> ")
    if wanted != "b (p s) h d" or pages not in {"(b p) h s d", "(b p) s h d"}:
        raise NotImplementedError(pattern)
    tokens = tensor.transpose(1, 2) if pages == "(b p) h s d" else tensor
    return tokens.reshape(b, -1, *tokens.shape[2:])
