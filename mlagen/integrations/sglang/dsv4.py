"""DeepSeek-V4 and V4.1 in SGLang: its ``dsv4`` backend with mlagen's decode for FlashMLA's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
from sglang.srt.runtime_context import get_exec, get_platform

from mlagen.integrations.dsv4 import (
    ROW_BYTES,
    dsv4_calls,
    flash_mla_with_kvcache,
    padded_output,
)
from mlagen.integrations.sglang.runner import (
    check,
    layers_of,
    prefill_name,
    serve_drafts,
    warm_up,
)
from mlagen.values import require

_KERNEL = "_flash_mla_with_kvcache"


def backend_of(runner: Any, name: str) -> MlagenDSV4Backend:
    """Return the backend of a model runner, and warm up its kernels.

    Raises ValueError if no kernel serves the model, its cache or the options.
    """
    check(runner, name, MlagenDSV4Backend)
    prefill, kernels = prefill_name(runner), get_exec().kernel.dsv4_attn_backend
    require(prefill == name, "--attention-backend", f"{name} for prefill too", str(prefill))
    platform = get_platform()
    is_flash_mla = kernels == "flashmla" and not platform.is_sm120
    rule = "a GPU and options where SGLang calls FlashMLA"
    require(is_flash_mla, name, rule, f"--dsv4-attn-backend {kernels}")
    names = runner.model_config.hf_config.architectures or ()
    is_v41 = any(each.startswith("DeepseekV41") for each in names)
    # There SGLang calls a kernel of its own for some batches, whatever the backend.
    require(
        not (is_v41 and platform.is_sm100), name, "compute capability 9.0 for DeepSeek-V4.1", "10.0"
    )
    is_bf16 = runner.dtype is torch.bfloat16
    require(is_bf16, "dtype", f"torch.bfloat16 with {name}", str(runner.dtype))
    row_bytes = runner.token_to_kv_pool.get_swa_key_bytes_per_token()
    require(row_bytes == ROW_BYTES, name, f"rows of {ROW_BYTES} bytes", row_bytes)
    forward = vars(DeepseekV4AttnBackend).get("_forward_attention")
    calls_it = forward is not None and _KERNEL in forward.__code__.co_names
    require(calls_it, name, f"SGLang's DeepseekV4AttnBackend.{_KERNEL}", "none")
    backend = MlagenDSV4Backend(runner)
    serve_drafts(name, "dsv4", MlagenDSV4Backend)
    warm_up(call for layer in layers_of(runner) for call in dsv4_calls(layer.tp_q_head_num))
    return backend


def decode(heads: int, *, q: torch.Tensor, **call: Any) -> tuple[torch.Tensor, None]:
    """Attend as FlashMLA does, with the first heads of a query; SGLang drops the others."""
    out = padded_output(q, len(q), heads, q.shape[-2]).unsqueeze(1)
    flash_mla_with_kvcache(q=q[..., :heads, :], out=out[..., :heads, :], **call)
    return out, None


class MlagenDSV4Backend(DeepseekV4AttnBackend):
    """SGLang's DeepSeek-V4 backend; what calls FlashMLA's decode runs mlagen's kernels."""

    heads: int  # of the layer that attends, without those that pad a query for FlashMLA

    # The constructor of SGLang sets it to FlashMLA's function.
    _flash_mla_with_kvcache = property(lambda self: partial(decode, self.heads), lambda _, __: None)

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Attend with the heads of a layer."""
        self.heads = layer.tp_q_head_num
        return super().forward(q, k, v, layer, forward_batch, *args, **kwargs)
