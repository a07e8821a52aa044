"""GQA decode in vLLM on sm_90a: the backend ``MLAGEN_GQA``.

It is vLLM's FlashInfer backend, whose decode on sm_90 is XQA, with mlagen in the place of XQA.
Prefill, and the decode of a layer that XQA does not serve, stay with FlashInfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.utils.flashinfer import force_use_trtllm_attention
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flashinfer as vllm_flashinfer
from vllm.v1.attention.backends.utils import get_flashinfer_layout_string
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from mlagen.decode import xqa_batch_decode_with_kv_cache as decode
from mlagen.integrations.servers import follow_batch_invariance
from mlagen.integrations.vllm.decode_batches import Sm90Backend
from mlagen.integrations.vllm.warm_up import WARM_UP, Group
from mlagen.integrations.warm_up import Calls, gqa_calls, workspace
from mlagen.spec.gqa.variant import has_dim

_Pair = tuple[torch.Tensor, torch.Tensor]
# Of FlashInfer's FA3; its FA2, which prefills other layers, takes no FP8 query.
_FP8_PREFILL_HEAD_DIMS = (64, 128, 256)
# What FlashInfer reads of a layer, besides the scale of the query.
_SCALES = ("_q_scale", "_k_scale", "_k_scale_float", "_v_scale", "_v_scale_float")


def supports_trtllm_attention(is_prefill: bool = False) -> bool:
    """Return whether a decode on sm_90 takes the place of XQA, which here needs no cubins.

    vLLM's function of that name asks NVIDIA's repository of cubins, for 5 s without a network.
    """
    return not is_prefill


def can_use_trtllm_attention(
    num_qo_heads: int, num_kv_heads: int, is_prefill: bool = False
) -> bool:
    """Return the same for the heads of a layer, where no option excludes it."""
    return (
        force_use_trtllm_attention() is not False
        and supports_trtllm_attention(is_prefill)
        and num_qo_heads % num_kv_heads == 0
    )


def _takes_fp8_query(head_dim: int, kv_cache_dtype: str) -> bool:
    """Return whether a prefill may have an FP8 query, which vLLM stores in e4m3 alone."""
    return head_dim in _FP8_PREFILL_HEAD_DIMS and kv_cache_dtype != "fp8_e5m2"


def _for_flashinfer(layer: Any, attn_metadata: Any) -> Any:
    """Return the layer with a query of no scale where a prefill has it in 16 bits."""
    dtype = getattr(attn_metadata, "q_data_type_prefill", None)
    if layer._q_scale_float == 1.0 or dtype == torch.float8_e4m3fn:  # noqa: SLF001
        return layer
    scales = {name: getattr(layer, name, None) for name in _SCALES}
    return SimpleNamespace(**scales, _q_scale_float=1.0)


class Platform:
    """vLLM's platform, which also is of the families whose decode reads more caches.

    XQA of SM12x reads an NVFP4 cache, and the decode of SM10x pages of 128 tokens.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)

    def is_device_capability_family(self, capability: int, *args: Any) -> bool:
        """Return whether the GPU is of a family."""
        return capability in {100, 120} or bool(
            current_platform.is_device_capability_family(capability, *args)
        )


def _by_own_gate(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a function of vLLM's module that asks the functions above instead of vLLM's.

    Its globals are a copy: other backends of the process keep the module's own.
    """
    names |= {
        "can_use_trtllm_attention": can_use_trtllm_attention,
        "supports_trtllm_attention": supports_trtllm_attention,
        "_is_xqa_head_dim_supported": has_dim,
    }
    return FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


class MlagenGQAMetadataBuilder(Group, vllm_flashinfer.FlashInferMetadataBuilder):
    """FlashInfer's builder, which chooses XQA for decode also without cubins and a network."""

    # Prefill on sm_90 has no such kernel, for which each batch would ask vLLM's own gate.
    build = _by_own_gate(
        vllm_flashinfer.FlashInferMetadataBuilder.build,
        use_trtllm_attention=lambda *_, **__: False,
    )
    get_cudagraph_support = classmethod(
        _by_own_gate(
            vllm_flashinfer.FlashInferMetadataBuilder.get_cudagraph_support,
            current_platform=Platform(),
        )
    )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        init = _by_own_gate(
            vllm_flashinfer.FlashInferMetadataBuilder.__init__,
            FlashInferBackend=MlagenGQABackend,
            current_platform=Platform(),
        )
        init(self, kv_cache_spec, layer_names, vllm_config, device)
        self.add_to_warm_up(layer_names)

    def get_q_data_type(self, is_prefill: bool) -> torch.dtype:
        """Return the dtype of the query: of 16 bits where no prefill takes an FP8 one."""
        dtype: torch.dtype = super().get_q_data_type(is_prefill)
        if is_prefill and not _takes_fp8_query(self.head_dim, self.cache_dtype):
            dtype = self.model_config.dtype
        return dtype

    def decode_calls(self) -> Iterable[Calls]:
        """Return the calls of mlagen that decode the batches of the group, if any."""
        if not self.use_xqa:
            return []
        return gqa_calls(
            heads=self.num_qo_heads,
            kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            query_dtype=self.q_data_type_decode,
            kv_dtype=self.kv_cache_dtype,
            max_q_len=self.reorder_batch_threshold,
            has_soft_cap=bool(self.logits_soft_cap),
        )

    def warm_up_prefill(self) -> None:
        """Plan a prefill, for which FlashInfer compiles; vLLM does it for FLASHINFER alone."""
        if self.use_dcp:
            return
        tokens = self.reorder_batch_threshold + 1  # more than a decode has
        starts = torch.tensor([0, tokens], dtype=torch.int32, device="cpu")
        lengths = starts[1:]
        pages = -(-tokens // self.page_size)
        self.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts.to(self.device),
                query_start_loc_cpu=starts,
                seq_lens=lengths.to(self.device),
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=1,
                num_actual_tokens=tokens,
                max_query_len=tokens,
                max_seq_len=tokens,
                block_table_tensor=torch.zeros(1, pages, dtype=torch.int32, device=self.device),
                slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=self.device),
            ),
        )


class MlagenGQAImpl(vllm_flashinfer.FlashInferImpl):
    """FlashInfer's implementation, with a decode of its own where FlashInfer's has XQA."""

    _init = _by_own_gate(vllm_flashinfer.FlashInferImpl.__init__)

    def __init__(self, *args: Any, **layer: Any) -> None:
        self._init(*args, **layer)
        if self.alibi_slopes is not None:
            got = repr(self.alibi_slopes)
            raise NotImplementedError(f"mlagen: alibi_slopes is not supported by GQA, got {got}")
        WARM_UP.register_warmup()

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to the cache: decode, which comes first, by mlagen, and the rest as the base."""
        scaled = _for_flashinfer(layer, attn_metadata)
        kernel = getattr(getattr(attn_metadata, "decode", None), "kernel", None)
        if kernel is not vllm_flashinfer.FlashInferDecodeKernel.XQA:  # or a profiling run
            scales = (output_scale, output_block_scale)
            out: torch.Tensor = super().forward(
                scaled, query, key, value, kv_cache, attn_metadata, output, *scales
            )
            return out
        if attn_metadata.num_prefills:
            first = attn_metadata.num_decode_tokens
            prefills = copy(attn_metadata)
            prefills.num_actual_tokens -= first
            prefills.num_decode_tokens = 0
            prefills.decode = None
            super().forward(scaled, query[first:], key, value, kv_cache, prefills, output[first:])
        self._decode(layer, query, kv_cache, attn_metadata, output)
        return output

    def _decode(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, batch: Any, out: torch.Tensor
    ) -> None:
        """Write the output of the query tokens that are decoded."""
        part = batch.decode
        # A request of one token that pads a captured batch has a row too.
        tokens = len(part.seq_lens) if part.q_len_per_req == 1 else batch.num_decode_tokens
        pages, block_scales, layout = self._views(kv_cache, batch.kv_cache_layout)
        is_quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        decode(
            query[:tokens],
            pages,
            workspace(query.device),
            part.block_tables,
            part.seq_lens,
            part.max_seq_len,
            bmm1_scale=self.get_xqa_bmm1_scale(layer, batch.q_data_type_decode),
            bmm2_scale=layer._v_scale_float if is_quantized else 1.0,  # noqa: SLF001
            window_left=self.window_left,
            out=out[:tokens],
            sinks=self.sinks,
            kv_layout=layout,
            q_len_per_req=part.q_len_per_req,
            mask=part.mask,
            kv_cache_sf=block_scales,
            q_cu_seq_lens=part.q_cu_seq_lens,
            logits_soft_cap=self.logits_soft_cap,
        )

    def _views(self, kv_cache: torch.Tensor, layout: Any) -> tuple[_Pair, _Pair | None, str]:
        """Return keys and values, their block scales if there are any, and the layout."""
        if self.kv_cache_dtype == "nvfp4":
            views: tuple[_Pair, _Pair, str] = vllm_flashinfer._nvfp4_kv_views(  # noqa: SLF001
                kv_cache, self.num_kv_heads
            )
            return views
        if kv_cache.dtype == torch.uint8:  # as vLLM stores FP8
            is_e5m2 = self.kv_cache_dtype == "fp8_e5m2"
            kv_cache = kv_cache.view(torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn)
        pages = canonicalize_singleton_dim_strides(kv_cache.permute(*layout.layer_view_order))
        keys, values = pages.split(self.head_size, dim=-1)
        return (keys, values), None, get_flashinfer_layout_string(layout)


class MlagenGQABackend(Sm90Backend, vllm_flashinfer.FlashInferBackend):
    """The GQA backend, as vLLM selects and validates it."""

    name = "MLAGEN_GQA"
    impl = MlagenGQAImpl
    builder = MlagenGQAMetadataBuilder

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
    ]
    supports_sink = classmethod(_by_own_gate(vllm_flashinfer.FlashInferBackend.supports_sink))

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes, with the one of MiniMax-M3's sparse layers, which is their block.

        Its other layers are in one group with these.
        """
        config = get_current_vllm_config_or_none()
        model = getattr(config, "model_config", None)
        text = getattr(model, "hf_text_config", None)
        sparse = getattr(text, "sparse_attention_config", None) or {}
        sizes = super().get_supported_kernel_block_sizes(kv_cache_spec)
        block = sparse.get("sparse_block_size")
        return sizes if block is None else [*sizes, block]

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Return whether the kernels have the dtype, as vLLM's XQA call has the cache."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return whether decode is batch-invariant, as with ``VLLM_BATCH_INVARIANT=1``."""
        return follow_batch_invariance(envs.VLLM_BATCH_INVARIANT)
