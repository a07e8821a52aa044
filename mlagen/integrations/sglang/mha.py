"""GQA decode in SGLang: the TensorRT-LLM backend with mlagen's kernels for its decode kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.runtime_context import get_parallel

from mlagen.decode import xqa_batch_decode_with_kv_cache as decode
from mlagen.integrations.sglang.indexed import serve as serve_sparse
from mlagen.integrations.sglang.runner import (
    check,
    layers_of,
    max_q_len,
    prefill_name,
    serve_drafts,
    warm_up,
)
from mlagen.integrations.warm_up import gqa_calls, workspace
from mlagen.values import require


def backend_of(runner: Any, name: str) -> MlagenMHABackend:
    """Return the backend of a model runner, and warm up its kernels.

    Raises ValueError if no kernel serves the model, its cache or the options.
    """
    if runner.use_mla_backend:
        raise ValueError(f"{name}: expected a model without MLA")
    if prefill_name(runner) == name:
        raise ValueError(
            f"--prefill-attention-backend: expected another backend than {name}, which is for "
            "decode only, such as fa3"
        )
    parallel = get_parallel()
    require(not parallel.dcp_enabled, name, "--dcp-size 1", parallel.attn_dcp_size)
    layers = layers_of(runner)
    for layer in layers:
        dims, method = (layer.head_dim, layer.v_head_dim), str(layer.logit_capping_method)
        both, start = f"{dims[0]} and {dims[1]}", layer.xai_temperature_len
        require(dims[0] == dims[1], name, "keys and values of one head dim", both)
        require(not layer.logit_cap or method == "tanh", name, "a logit_cap by tanh", method)
        require(start <= 0, name, "scores of one temperature", f"one from {start} on")
    check(runner, name, MlagenMHABackend)
    serve_drafts(name, "trtllm_mha", MlagenMHABackend)
    backend = MlagenMHABackend(runner)
    kinds = serve_sparse(runner, backend)
    warm_up(
        call
        for layer in layers
        for kind in kinds
        for call in gqa_calls(
            **{
                "heads": layer.tp_q_head_num,
                "kv_heads": layer.tp_k_head_num,
                "head_dim": layer.head_dim,
                "page_size": runner.page_size,
                "query_dtype": runner.dtype,
                "kv_dtype": runner.kv_cache_dtype,
                "max_q_len": max_q_len(runner, name),
                "has_soft_cap": bool(layer.logit_cap),
            }
            | kind
        )
    )
    return backend


def _with_soft_cap(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a forward pass of SGLang that keeps the soft cap of its layer for the decode."""

    @wraps(forward)
    def run(
        self: MlagenMHABackend, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._soft_cap = layer.logit_cap or None
        return forward(self, q, k, v, layer, *args, **kwargs)

    return run


class MlagenMHABackend(TRTLLMHAAttnBackend):
    """SGLang's TensorRT-LLM backend; decode steps and drafts run mlagen's kernels."""

    # The query stays in 16 bits over an FP8 cache, and pages have any size, as with XQA. The
    # constructor of SGLang sets it by the GPU.
    is_xqa_impl = property(lambda _: True, lambda _, __: None)

    _soft_cap: float | None = None  # of the layer

    forward_decode = _with_soft_cap(TRTLLMHAAttnBackend.forward_decode)
    forward_extend = _with_soft_cap(TRTLLMHAAttnBackend.forward_extend)

    def _run_fixed_q_len_decode(
        self,
        query: torch.Tensor,
        kv_cache: Any,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        bmm1_scale: float | torch.Tensor,
        bmm2_scale: float | torch.Tensor,
        window_left: int,
        sinks: torch.Tensor | None,
        q_len_per_req: int = 1,
        kv_cache_sf: Any = None,
        out: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cached tokens; among the drafts of a request causally."""
        del mask, out_dtype  # of a chain of drafts, which is causal; that of the query, or of out
        result = decode(
            query,
            kv_cache,
            workspace(query.device),
            block_tables,
            seq_lens,
            self.max_context_len,
            bmm1_scale,
            bmm2_scale,
            window_left,
            out,
            sinks,
            "HND",
            q_len_per_req=q_len_per_req,
            kv_cache_sf=kv_cache_sf,
            logits_soft_cap=self._soft_cap,
        )
        assert isinstance(result, torch.Tensor)
        return result
