"""Sparse layers of MiniMax-M3 and Qwen3.8 in SGLang, whose decode is replaced with ``mlagen_mha``.

SGLang gives these layers a backend of its own, whatever the options name. Hooks around its decode,
of the registry for plugins, call mlagen instead.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from sglang.srt.configs.model_config import is_minimax_sparse
from sglang.srt.layers.attention.qsa.config import is_qwen_qsa

from mlagen.integrations.sglang.runner import hook
from mlagen.msa_ops import msa_sparse_decode_attention
from mlagen.sparse import qsa_sparse_paged_attention
from mlagen.values import require

_LAYERS = "sglang.srt.layers.attention"
_BLOCKS = f"{_LAYERS}.minimax_sparse_ops.minimax_sparse.flash_decode_with_gqa_share_sparse"
_TOKENS = f"{_LAYERS}.qwen_sparse_attn_backend.QwenSparseAttnBackend._forward_paged_attention"
_NEEDS = {  # their parameters that are read
    _BLOCKS: "q sink k_cache v_cache block_size topk_idx sm_scale page_size k_scale v_scale",
    _TOKENS: "self q layer forward_batch topk_indices",
}
_BLOCK = 128  # tokens, of MiniMax-M3
_dense: list[Any] = []  # the backends of this process that know the pages of a step
_logger = logging.getLogger("mlagen")


def serve(runner: Any, backend: Any) -> list[dict[str, Any]]:
    """Replace the decode of a model's sparse layers, if it has any.

    It returns what :func:`mlagen.integrations.warm_up.gqa_calls` takes for each kind of layers,
    in the place of what it takes for dense ones. ``backend`` has the block tables of a step. Raises
    ValueError if the function of SGLang has other parameters.
    """
    config = runner.model_config.hf_config
    if is_qwen_qsa(config):
        _replace(_TOKENS, attend_to_tokens)
        return [{"page_size": 1, "sparse_block": 1, "max_q_len": 1}]
    if not is_minimax_sparse(config):
        return [{}]
    if runner.page_size != _BLOCK:
        _logger.warning(
            "page_size: expected %d, for mlagen_mha to decode the sparse layers of MiniMax-M3, got "
            "%d; pass --page-size %d",
            *(_BLOCK, runner.page_size, _BLOCK),
        )
        return [{}]
    _dense.append(backend)
    _replace(_BLOCKS, partial(attend_to_blocks, _dense))
    return [{}, {"sparse_block": _BLOCK, "max_q_len": 1}]


def _replace(target: str, function: Callable[..., Any]) -> None:
    expected, got = _NEEDS[target].split(), list(inspect.signature(resolve_name(target)).parameters)
    rule = f"SGLang's {target}({', '.join(expected)})"
    require({*expected} <= {*got}, "mlagen_mha", rule, f"({', '.join(got)})")
    hook(target, function)
    _logger.info("Using mlagen_mha for the decode of %s.", target)


def attend_to_blocks(dense: list[Any], theirs: Callable[..., Any], **call: Any) -> Any:
    """Attend from each request's query token to blocks, or as SGLang where it has other pages.

    ``call`` is that of SGLang's ``flash_decode_with_gqa_share_sparse``, and ``dense`` has the
    backends of dense layers. It says nothing of the one whose step it is in: SGLang's function
    attends if there are several, for PD multiplexing or two batches that overlap.
    """
    backend, *others = dense
    query, step = call["q"], backend.forward_metadata
    is_served = (
        not others
        and call["sink"] is None
        and call.get("hisparse_slots") is None
        and call["block_size"] == call["page_size"] == backend.page_size
        and len(step.page_table) == len(query)
    )
    if not is_served:
        return theirs(**call)
    keys, values = (
        call[name].unflatten(0, (-1, backend.page_size)).transpose(1, 2)
        for name in ("k_cache", "v_cache")
    )
    return msa_sparse_decode_attention(
        query,
        keys,
        values,
        call["topk_idx"],
        page_table=step.page_table,
        seqused_k=step.cache_seqlens_int32,
        softmax_scale=call["sm_scale"],
        k_global_scale=call["k_scale"],
        v_global_scale=call["v_scale"],
    )


def attend_to_tokens(
    theirs: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    topk_indices: torch.Tensor,
) -> torch.Tensor:
    """Attend from each query token to tokens of its request, whose slots are pages of one token."""
    del theirs
    step = backend._resolve_metadata(forward_batch)  # noqa: SLF001 - SGLang's
    named = backend._expand_block_indices(topk_indices, step)  # noqa: SLF001 - SGLang's
    rows, width = named.shape
    indices = torch.empty(rows, width + 1, dtype=torch.int32, device=q.device)
    lengths = step.sequence_lengths[:, None]
    indices[:, :width] = named.where(named < lengths, -1)
    indices[:, width] = width
    requests = step.row_req_pool_indices
    if requests is None:
        requests = forward_batch.req_pool_indices
    pool = backend.token_to_kv_pool
    out = qsa_sparse_paged_attention(
        q,
        pool.get_key_buffer(layer.layer_id).unsqueeze(1),
        pool.get_value_buffer(layer.layer_id).unsqueeze(1),
        indices,
        backend.req_to_token_pool.req_to_token,
        requests.int(),
        use_prefill_config=False,
        # The call's own factor of the scores is that of the head dim.
        k_scale=layer.scaling * q.shape[-1] ** 0.5,
    )
    assert isinstance(out, torch.Tensor)
    return out.flatten(1)
