"""MLA layers whose decode steps absorb ``kv_b_proj`` and read the compressed cache."""

from __future__ import annotations

from math import isclose
from types import MethodType
from typing import Any

import torch

from mlagen.errors import UnsupportedError
from mlagen.integrations.transformers.steps import (
    Pages,
    is_bounds,
    pages_of,
    record,
    top_k_of,
    workspace_of,
)
from mlagen.mla import BatchMLAPagedAttentionWrapper

_DIMS = (512, 64)  # latent and RoPE, of runs without a plan
_RUN_SCALE = 192**-0.5  # of runs without a plan; the query takes any other factor
_DTYPES = (torch.bfloat16, torch.float16)


def mla_layers(model: Any) -> list[Any]:
    """Return the MLA layers of a model, all of which decode by absorbed weights.

    Raises UnsupportedError if there is none, or one that no kernel supports.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "expand_kv")]
    if not layers:
        raise UnsupportedError(
            f"model: expected layers with expand_kv (MLA), got {type(model).__name__}"
        )
    for layer in layers:
        dims = (layer.kv_lora_rank, layer.qk_rope_head_dim)
        if dims != _DIMS:
            raise UnsupportedError(
                f"kv_lora_rank, qk_rope_head_dim: expected {_DIMS} for absorbed decode, got {dims}"
            )
        dtype = layer.kv_b_proj.weight.dtype
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise UnsupportedError(
                f"kv_b_proj.weight: expected a floating-point weight of 16 or 32 bits, got {dtype}"
            )
    return layers


def absorb(layer: Any) -> None:
    """Make a layer pass its compressed cache to the attention function ``mlagen``."""
    layer.expand_kv = MethodType(_keep_latents, layer)


def is_absorbed(module: Any) -> bool:
    """Return whether a layer passes its compressed cache."""
    return "expand_kv" in module.__dict__


def expanded(module: Any, latents: torch.Tensor, rope: torch.Tensor) -> Any:
    """Return keys and values of an absorbed layer, as the model computes them."""
    return type(module).expand_kv(module, latents, rope)


def latent_step(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    rope: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    indices: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return ``[batch, 1, heads, v_head_dim]`` of a decode step, None if no kernel serves it.

    ``query`` is ``[batch, heads, q_len, qk_nope_head_dim + 64]``; ``latents`` and ``rope`` are the
    cache, ``[batch, 1, tokens, 512 or 64]``; ``mask`` is bounds, or a mask of ``sdpa``; ``indices``
    are an indexer's tokens, int32 ``[batch, q_len, top_k]``, masked ones last.
    """
    if query.shape[2] != 1 or query.dtype not in _DTYPES or latents.dtype != query.dtype:
        return None
    batch, _, tokens, _ = latents.shape
    if indices is not None and mask is not None and mask.dtype == torch.bool:
        # Sparse kernels read latents and RoPE keys from one tensor, so they are gathered.
        rows, bounds = top_k_of(mask, batch, tokens, indices.shape[-1])
        chosen, tokens = (indices + rows).view(-1), indices.shape[-1]
        latents, rope = (cache.flatten(0, 2).index_select(0, chosen) for cache in (latents, rope))
        served = "the top-k tokens of the indexer"
    elif indices is None and mask is not None and is_bounds(mask):
        bounds, served = mask, ""
    else:
        return None
    pages = pages_of(bounds, tokens, heads=1)
    record(f"mlagen MLA, {served or pages.described}")
    return _attend(module, query, latents, rope, pages, scaling)


def _attend(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    rope: torch.Tensor,
    pages: Pages,
    scaling: float,
) -> torch.Tensor:
    factor = scaling / _RUN_SCALE
    query = query if isclose(factor, 1.0) else query * factor
    q_latent, q_rope, value_weight = _absorbed(module, query)
    out = BatchMLAPagedAttentionWrapper(workspace_of(query), backend="cutlass").run(
        q_latent,
        q_rope,
        pages.of(latents).squeeze(1),
        pages.of(rope).squeeze(1),
        kv_len=pages.seq_lens,
        page_table=pages.block_tables,
    )
    assert isinstance(out, torch.Tensor)
    return _values(out, value_weight)


def _absorbed(module: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the two parts of the absorbed query, ``[batch, heads, ...]``, and the value half.

    Scores of absorbed queries are those of the expanded keys: q (W c) = (q W) c.
    """
    nope_dim = module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(query.shape[1], -1, _DIMS[0])
    key_weight, value_weight = weight.split_with_sizes((nope_dim, module.v_head_dim), dim=1)
    q_nope, q_rope = query.squeeze(2).split_with_sizes((nope_dim, _DIMS[1]), dim=-1)
    q_latent = torch.bmm(q_nope.transpose(0, 1), key_weight)
    return q_latent.transpose(0, 1), q_rope, value_weight


def _values(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[batch, 1, heads, v_head_dim]``, in the order that the output projection reads."""
    by_head = out.transpose(0, 1), weight.mT
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.bmm(*by_head).transpose(0, 1)[:, None]
    values = out.new_empty(*out.shape[:2], weight.shape[1])
    torch.bmm(*by_head, out=values.transpose(0, 1))
    return values.unsqueeze(1)


def _keep_latents(layer: Any, latents: torch.Tensor, rope: torch.Tensor) -> Any:
    """Replace ``expand_kv``, which expands the whole cache at every step."""
    if layer.config._attn_implementation == "mlagen":  # noqa: SLF001
        return latents, rope
    return type(layer).expand_kv(layer, latents, rope)
