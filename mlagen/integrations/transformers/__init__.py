"""Attention of Hugging Face transformers: decode steps by mlagen, everything else by sdpa.

:func:`register` adds the attention implementations, and :func:`use_mla` makes an MLA model decode
over its compressed cache. Needs transformers 5.17 or newer: ``pip install '.[transformers]'``.
"""

from __future__ import annotations

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mlagen.integrations.transformers.attention import attention
from mlagen.integrations.transformers.continuous import is_paged_cache_known, paged_attention
from mlagen.integrations.transformers.latent import absorb, mla_layers
from mlagen.integrations.transformers.steps import decode_mask, explain

__all__ = ["explain", "register", "use_mla"]


def register() -> None:
    """Add ``mlagen`` and ``paged|mlagen`` to the attention implementations of transformers.

    ``attn_implementation="mlagen"`` serves the decode steps of a model with a ``StaticCache``, one
    query token over full causal attention, by grouped-query attention in place. Everything else is
    computed as by ``sdpa``, or with a soft cap as by ``eager``: prompts, a cache whose length
    changes at every token, sliding windows and other masks. ``paged|mlagen`` serves continuous
    batching of transformers 5.17; later ones have another cache, or admit no names but their own.
    :func:`explain` says what served each call.
    """
    AttentionInterface.register("mlagen", attention)
    AttentionMaskInterface.register("mlagen", decode_mask)
    if is_paged_cache_known():
        AttentionInterface.register("paged|mlagen", paged_attention)


def use_mla(model: object) -> None:
    """Make the MLA layers of a model decode over its compressed cache, by absorbed weights.

    Registers and sets ``attn_implementation="mlagen"``. Decode steps absorb ``kv_b_proj`` into the
    query and the output, and so never expand the cache. Layers with an indexer, as in
    DeepSeek-V3.2, attend to its top-k tokens. Prompts are computed as by ``sdpa``. Another
    attention implementation restores the layers; it needs a new cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With layers whose ``expand_kv`` takes latents of 512 elements and RoPE keys of 64:
        DeepSeek-V2, V3 and V3.2, GLM-5, Kimi and others. Their ``kv_b_proj`` has a floating-point
        weight.

    Raises
    ------
    UnsupportedError
        If there is no such layer, or one that no kernel supports.
    """
    layers = mla_layers(model)
    register()
    model.set_attn_implementation("mlagen")  # type: ignore[attr-defined]
    for layer in layers:
        absorb(layer)
