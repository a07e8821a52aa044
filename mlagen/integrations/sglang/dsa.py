"""Sparse MLA decode (DSA) in SGLang: its ``dsa`` backend with mlagen's kernels for decode."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from torch.nn.functional import pad

from mlagen.integrations.sglang.mla import introduce
from mlagen.integrations.sglang.runner import check, serve_drafts, warm_up_mla
from mlagen.integrations.warm_up import workspace
from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla as decode
from mlagen.spec.dtype import DType
from mlagen.values import require

_ROW_BYTES = DType.FP8_DS_MLA.row_bytes(576)  # as FlashMLA reads it


def backend_of(runner: Any, name: str) -> MlagenDSABackend:
    """Return a runner's backend, with warm kernels, that SGLang's models treat as ``dsa``.

    Raises ValueError if no kernel serves the model, its cache or the options.
    """
    check(runner, name, MlagenDSABackend)
    backend = MlagenDSABackend(runner)
    is_fp8 = backend.kv_cache_dtype == torch.float8_e4m3fn
    row_bytes = backend.kv_cache_dim
    both = "--dsa-prefill-backend flashmla_kv --dsa-decode-backend flashmla_kv"
    advice = f"pass --kv-cache-dtype bfloat16, or {both}"
    rule = f"rows of {_ROW_BYTES} bytes in an FP8 cache"
    require(not is_fp8 or row_bytes == _ROW_BYTES, name, rule, f"{row_bytes}; {advice}")
    require(backend.dcp_size <= 1, name, "--dcp-size 1", backend.dcp_size)
    introduce(name, "dsa")
    serve_drafts(name, "dsa", MlagenDSABackend)
    warm_up_mla(
        runner,
        backend,
        page_size=backend.physical_page_size,
        query_dtype=runner.dtype,
        kv_dtype=torch.uint8 if is_fp8 else backend.kv_cache_dtype,
        is_sparse=True,
    )
    return backend


class MlagenDSABackend(DeepseekSparseAttnBackend):
    """SGLang's DSA backend; decode steps and the verification of drafts run mlagen's kernels."""

    # Of the implementations, fa3 gets the query in two parts and plans nothing on the host. The
    # constructor of SGLang sets it by an option.
    dsa_decode_impl = property(lambda _: "fa3", lambda _, __: None)

    def _forward_fa3(
        self,
        q_rope: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        q_nope: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        sm_scale: float,
        logit_cap: float,
        page_size: int,
    ) -> torch.Tensor:
        """Attend to slots of the cache: the first ``cache_seqlens`` of each row of ``page_table``.

        Returns the output of each query token, ``[tokens, heads, v_head_dim]``.
        """
        del cu_seqlens_q, cu_seqlens_k, max_seqlen_q, page_size
        if logit_cap:
            raise NotImplementedError(f"mlagen: logit_cap is not supported by MLA, got {logit_cap}")
        if kv_cache.dtype == torch.float8_e4m3fn:
            kv_cache = kv_cache.view(torch.uint8)  # rows of fp8_ds_mla
        width, tokens = page_table.shape[-1], len(q_nope)
        # A padded batch has more lengths, or fewer, than query tokens.
        lengths = pad(cache_seqlens, (0, tokens - len(cache_seqlens)))
        out = decode(
            (q_nope.unsqueeze(1), q_rope.unsqueeze(1)),
            kv_cache.view(-1, self.physical_page_size, kv_cache.shape[-1]),
            workspace(q_nope.device),
            self.qk_nope_head_dim,
            v_head_dim,
            self.qk_rope_head_dim,
            page_table.unsqueeze(1),
            lengths,
            width,
            sparse_mla_top_k=width,
            bmm1_scale=sm_scale,
        )
        assert isinstance(out, torch.Tensor)
        return out.squeeze(1)
