"""Modules in place of vLLM, with the names that the plugin and its tests take from it.

``test_signatures.py`` compares them with vLLM where it is installed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum, IntEnum
from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from tests.integrations.servers import fields_of, method, named, stub

T = TypeVar("T")
AttentionCGSupport = Enum(
    "AttentionCGSupport",
    {"ALWAYS": 3, "UNIFORM_BATCH": 2, "UNIFORM_SINGLE_TOKEN_DECODE": 1, "NEVER": 0},
)
AttentionType = Enum(
    "AttentionType", {"DECODER": "decoder", "ENCODER_ONLY": "encoder_only"}, type=str
)
QueryLenSupport = Enum(
    "QueryLenSupport", {"SINGLE_ONLY": "single_only", "UNIFORM": "uniform", "VARLEN": "varlen"}
)
FlashInferDecodeKernel = Enum("FlashInferDecodeKernel", {"XQA": "xqa", "TRTLLM_GEN": "trtllm-gen"})


class DeviceCapability(NamedTuple):
    """A compute capability."""

    major: int
    minor: int


@dataclass(frozen=True)
class MultipleOf:
    """Any page size that is a multiple of a number."""

    base: int


class KVCacheLayout(Enum):
    """The order of the axes of a cache: layers, blocks, heads, tokens, elements."""

    LBHNC = (0, 1, 2, 3, 4)

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """The order of the axes of a layer's view."""
        return (0, 1, 2, 3)


class AttentionBackendEnum:
    """The registry of backends, with the part of an enum's interface that the plugin uses."""

    __members__: ClassVar[dict[str, AttentionBackendEnum]] = {}

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def register(cls, name: str, value: str) -> AttentionBackendEnum:
        """Add a backend; a name may be added once."""
        if name in cls.__members__:
            raise ValueError(name)
        return cls.__members__.setdefault(name, cls(value))

    def get_class(self) -> Any:
        """Import the class of a backend."""
        module, _, name = self.path.rpartition(".")
        return getattr(import_module(module), name)


class AttentionBackend:
    """The base class of backends."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    get_name = get_impl_cls = get_builder_cls = staticmethod(stub())
    get_supported_kernel_block_sizes = staticmethod(stub("kv_cache_spec", [MultipleOf(1)]))
    get_preferred_block_size = method("default_block_size")
    get_supported_head_sizes = method("", [])
    supports_head_size = method("head_size", result=True)
    is_mla = method("", result=False)
    is_sparse = method("", result=False)
    customize_spec = method("spec")
    supports_compute_capability = method("capability", result=True)
    supports_batch_invariance = method("", result=False)
    supports_combination = method(
        "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix "
        "device_capability",
        None,
    )

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Return whether it serves a cache."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def validate_configuration(cls, **call: Any) -> list[str]:
        """Return the reasons against a configuration, those that the tests provoke."""
        sizes = [getattr(size, "base", size) for size in cls.get_supported_kernel_block_sizes()]
        checks = {
            "head_size": call["head_size"] in cls.get_supported_head_sizes(),
            "dtype": call["dtype"] in cls.supported_dtypes,
            "kv_cache_dtype": cls.supports_kv_cache_dtype(call["kv_cache_dtype"]),
            "block_size": any(call["block_size"] % size == 0 for size in sizes),
            "compute capability": cls.supports_compute_capability(call["device_capability"]),
            "sparse": cls.is_sparse() or not call["use_sparse"],
            "non-sparse": call["use_sparse"] or not cls.is_sparse(),
        }
        return [f"{name} not supported" for name, holds in checks.items() if not holds]


class AttentionMetadataBuilder(Generic[T]):
    """The base class of builders."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int = 1
    vllm_config: Any

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        self.reorder_batch_threshold = reorder_batch_threshold or 1
        if supports_spec_as_decode and supports_dcp_with_varlen:
            self.reorder_batch_threshold = max_decode_query_len(self.vllm_config)

    get_varlen_cudagraph_max_query_len = method("vllm_config kv_cache_spec", None)


def max_decode_query_len(vllm_config: Any) -> int:
    """Return the query tokens of a request with drafts."""
    return 1 + int(vllm_config.speculative_config.num_speculative_tokens)


CommonAttentionMetadata = fields_of(
    "CommonAttentionMetadata",
    "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len "
    "max_seq_len block_table_tensor slot_mapping",
    seq_lens_cpu_upper_bound=None,
)


class VllmJitKernel(Generic[T]):
    """A kernel with a warm-up."""

    def __init__(self) -> None:
        self.registered = 0

    def register_warmup(self, *args: Any, **kwargs: Any) -> None:
        """Register it with the warm-up of the active runner; here there is none."""
        del args, kwargs
        self.registered += 1

    get_warmup_keys = stub("self args kwargs")
    compile = stub("self compile_key")
    compile_many = stub("self compile_keys")


def init_logger(name: str) -> logging.Logger:
    """Return a logger of vLLM's."""
    return logging.getLogger(name)


class MLACommonBackend(AttentionBackend):
    """The base class of MLA backends."""

    is_mla = method("", result=True)


MLACommonDecodeMetadata = fields_of(
    "MLACommonDecodeMetadata", "block_table seq_lens dcp_tot_seq_lens"
)


@dataclass
class MLACommonMetadata(Generic[T]):
    """A batch."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    decode: Any = None


@dataclass(kw_only=True)
class SparseMLACommonMetadata(MLACommonMetadata[Any]):
    """A sparse batch."""

    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    seq_lens: torch.Tensor | None = None
    block_size: int = 64
    prefill: Any = None


class MLACommonMetadataBuilder(AttentionMetadataBuilder[T]):
    """The builder of dense MLA batches."""

    query_len_support: ClassVar[Any] = QueryLenSupport.SINGLE_ONLY

    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
        metadata_cls: Any = None,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        del layer_names, device, metadata_cls
        self.vllm_config, self.kv_cache_spec = vllm_config, kv_cache_spec
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size
        self.cp_kv_cache_interleave_size = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._init_reorder_batch_threshold(1, True, supports_dcp_with_varlen)

    _build_decode = stub(
        "self block_table_tensor seq_lens_device max_seq_len query_start_loc_cpu "
        "query_start_loc_device num_decode_tokens max_query_len dcp_tot_seq_lens_device"
    )


class SparseMLACommonMetadataBuilder(AttentionMetadataBuilder[T]):
    """The builder of sparse MLA batches."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del layer_names, device
        self.vllm_config, self.kv_cache_spec = vllm_config, kv_cache_spec
        self.dcp_world_size = vllm_config.parallel_config.decode_context_parallel_size
        self.chunked_prefill_workspace = torch.empty(128, 576, dtype=torch.bfloat16)

    build = stub("self common_prefix_len common_attn_metadata fast_build")


class MLACommonImpl(Generic[T]):
    """The implementation of MLA, of which the plugin takes what it sets."""

    can_return_lse_for_decode: bool = False
    lse_base_on_e: bool = True
    supports_dcp: bool = False
    need_to_return_lse_for_decode: bool = False
    supports_dense_mha_prefill: bool = True
    supports_quant_query_input: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        del head_size, alibi_slopes, sliding_window
        del logits_soft_cap, attn_type, kv_sharing_target_layer_name
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.scale, self.kv_cache_dtype = scale, kv_cache_dtype
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
            setattr(self, name, mla_args[name])
        self.dcp_world_size, self.dcp_rank = 1, 0
        self.supports_quant_query_input = True

    forward_mqa = stub("self q kv_c_and_k_pe_cache attn_metadata layer")


class SparseMLACommonImpl(MLACommonImpl[T]):
    """The implementation of sparse MLA, with a conversion of indices before it."""

    topk_indices_buffer: torch.Tensor | None = None
    _forward_mqa_kernel = stub(
        "self q kv_cache topk_indices valid_counts layer block_size is_decode"
    )


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Any, dst: Any, block_table: Any, workspace_starts: Any, batch_size: int, **_: Any
) -> None:
    """Fail, as it does without a GPU."""
    raise NotImplementedError


def triton_convert_req_index_to_global_index(
    req_id: Any, block_table: Any, token_indices: Any, **_: Any
) -> Any:
    """Fail, as it does without a GPU."""
    raise NotImplementedError


def align_blocks_to_rows(spec: Any, rows: int = 1) -> Any:
    """Return the spec, as vLLM's, with an alignment; here a pair."""
    return spec, rows


def flat_kv_row_view(kv_cache: torch.Tensor, block_size: int) -> tuple[torch.Tensor, int]:
    """Return the rows of a cache, and how many lie between the starts of two blocks."""
    blocks, _, width = kv_cache.shape
    rows_per_block = kv_cache.stride(0) // width
    shape = ((blocks - 1) * rows_per_block + block_size, width)
    return kv_cache.as_strided(shape, (width, 1)), rows_per_block


FlashInferTrtllmAPIDecode = fields_of(
    "FlashInferTrtllmAPIDecode",
    "kernel block_tables seq_lens max_seq_len",
    q_len_per_req=1,
    q_cu_seq_lens=None,
    mask=None,
    dcp_query_start_loc=None,
)
FlashInferMetadata = fields_of(
    "FlashInferMetadata",
    "kv_cache_layout num_actual_tokens slot_mapping q_data_type_prefill q_data_type_decode "
    "num_decodes num_decode_tokens num_prefills num_prefill_tokens causal prefill decode",
)


def get_flashinfer_layout_string(layout: KVCacheLayout) -> str:
    """Return the layout in FlashInfer's words."""
    return {"LBHNC": "HND"}[layout.name]


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """Return whether a cache has scales."""
    return kv_cache_dtype.startswith(("fp8", "nvfp4"))


class Platform:
    """The GPU, as vLLM sees it."""

    @classmethod
    def is_device_capability_family(cls, capability: int, device_id: int = 0) -> bool:
        """Return whether it is of a family: it is a Hopper."""
        del device_id
        return capability == 90


current_platform = Platform()


def _is_xqa_head_dim_supported(head_dim: int) -> bool:
    """Return whether FlashInfer's XQA has a kernel."""
    return head_dim <= 256


def _nvfp4_kv_views(kv_cache: torch.Tensor, num_kv_heads: int) -> tuple[Any, Any, str]:
    """Return data and scales of keys and values, and their layout."""
    pages, _, page_size, width = kv_cache.shape
    is_hnd = kv_cache.stride(2) == width
    dims = (num_kv_heads, page_size) if is_hnd else (page_size, num_kv_heads)
    rows, start, parts = num_kv_heads * page_size, kv_cache.storage_offset(), []
    for part in (width * 8 // 9, width // 9) * 2:
        strides = (kv_cache.stride(0), dims[1] * part, part, 1)
        parts.append(kv_cache.as_strided((pages, *dims, part), strides, start))
        start += rows * part
    keys, key_scales, values, value_scales = parts
    return (keys, values), (key_scales, value_scales), "HND" if is_hnd else "NHD"


def canonicalize_singleton_dim_strides(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has no degenerate strides."""
    return t


def force_use_trtllm_attention() -> bool | None:
    """Return the option of the engine."""
    return None


def supports_trtllm_attention(is_prefill: bool = False) -> bool:
    """Fail, as a look-up of cubins does without a network."""
    del is_prefill
    raise OSError("the network was asked")


def can_use_trtllm_attention(
    num_qo_heads: int, num_kv_heads: int, is_prefill: bool = False
) -> bool:
    """Fail, as a look-up of cubins does without a network."""
    del num_qo_heads, num_kv_heads
    return supports_trtllm_attention(is_prefill)


def use_trtllm_attention(*_: Any, **named: Any) -> bool:
    """Fail likewise."""
    return supports_trtllm_attention(**named)


class FlashInferBackend(AttentionBackend):
    """The GQA backend of FlashInfer."""

    get_supported_kernel_block_sizes = staticmethod(stub("kv_cache_spec", [16, 32, 64]))
    get_supported_head_sizes = method("", [64, 128, 256, 512])

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether it serves sinks."""
        return supports_trtllm_attention(is_prefill=False)


class FlashInferMetadataBuilder(AttentionMetadataBuilder[Any]):
    """The builder of FlashInfer batches, with its choice of XQA."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del layer_names, device
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.head_dim = kv_cache_spec.head_size
        self.cache_dtype = vllm_config.cache_config.cache_dtype
        self.q_data_type_prefill = self.get_q_data_type(is_prefill=True)
        self.attention_config = vllm_config.attention_config
        self.use_dcp = False
        self.use_xqa = (
            can_use_trtllm_attention(8, kv_cache_spec.num_kv_heads, is_prefill=False)
            and _is_xqa_head_dim_supported(kv_cache_spec.head_size)
            and (
                not kv_cache_spec.kv_quant_mode.is_nvfp4
                or current_platform.is_device_capability_family(120)
            )
        )
        assert kv_cache_spec.block_size <= 64 or current_platform.is_device_capability_family(100)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Return whether a batch of prefill has vLLM's other kernels."""
        del common_prefix_len, common_attn_metadata, fast_build
        return use_trtllm_attention(is_prefill=True)

    def get_q_data_type(self, is_prefill: bool) -> torch.dtype:
        """Return the dtype of the query, by that of the cache."""
        is_fp8 = is_prefill and self.cache_dtype.startswith("fp8")
        return torch.float8_e4m3fn if is_fp8 else torch.bfloat16

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return which batches a CUDA graph may hold."""
        del vllm_config
        if (
            can_use_trtllm_attention(num_qo_heads=8, num_kv_heads=kv_cache_spec.num_kv_heads)
            and _is_xqa_head_dim_supported(kv_cache_spec.head_size)
            and (
                not kv_cache_spec.kv_quant_mode.is_nvfp4
                or current_platform.is_device_capability_family(120)
            )
        ):
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class FlashInferImpl:
    """The implementation of GQA, of which the plugin takes prefill and scales."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **layer: Any
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = scale, layer["kv_cache_dtype"]
        self.alibi_slopes, self.logits_soft_cap = layer["alibi_slopes"], layer["logits_soft_cap"]
        self.supports_xqa_or_trtllm_gen_decode = can_use_trtllm_attention(num_heads, num_kv_heads)

    def get_xqa_bmm1_scale(self, layer: Any, q_data_type: torch.dtype) -> float:
        """Return the scale of the scores."""
        del q_data_type
        is_quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        return float(self.scale * (layer._k_scale_float if is_quantized else 1.0))

    forward = stub(
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    )


class FlashAttentionDiffKVBackend:
    """FlashAttention's backend of values of their own dims."""

    get_name = get_impl_cls = get_builder_cls = staticmethod(stub())
    supports_head_size = method("head_size", result=True)
    supports_compute_capability = method("capability", result=True)
    supports_batch_invariance = method("", result=True)

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes."""
        del kv_cache_spec
        return [MultipleOf(16)]

    head_size_v: int = 128

    @classmethod
    def set_head_size_v(cls, head_size_v: int) -> None:
        """Set the dims of a value."""
        cls.head_size_v = head_size_v


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder[Any]):
    """The builder of FlashAttention's batches."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del layer_names, device
        self.kv_cache_spec, self.cache_config = kv_cache_spec, vllm_config.cache_config
        self.vllm_config, self.model_config = vllm_config, vllm_config.model_config
        self.num_heads_q = self.model_config.get_num_attention_heads(vllm_config.parallel_config)


class KVQuantMode(IntEnum):
    """How a cache is quantized."""

    NONE = 0
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3


class TritonAttentionBackend:
    """Triton's backend."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto"]
    get_name = get_impl_cls = get_builder_cls = staticmethod(stub())
    supports_head_size = method("head_size", result=True)
    supports_compute_capability = method("capability", result=True)
    supports_batch_invariance = method("", result=True)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes."""
        del kv_cache_spec
        return [MultipleOf(16)]


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder[Any]):
    """The builder of Triton's batches."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del layer_names, device
        self.kv_cache_spec, self.vllm_config = kv_cache_spec, vllm_config
        config = vllm_config.model_config
        self.num_heads_q = config.get_num_attention_heads(vllm_config.parallel_config)


class TritonAttentionImpl:
    """Triton's implementation, of which the plugin takes prefill and the views of a cache."""

    forward = stub(
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    )

    def _pth_key_value_caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each with 4 bytes of scale behind them."""
        rows = kv_cache.transpose(1, 2)
        width = rows.shape[-1] // 2
        scales = rows.view(torch.float32)
        self._k_scale_cache = scales[..., width // 4 - 1]
        self._v_scale_cache = scales[..., -1]
        dtype = torch.int8 if kv_cache.dtype == torch.int8 else torch.float8_e4m3fn
        rows = rows.view(dtype)
        return rows[..., :width], rows[..., width:]


class FlashAttentionDiffKVImpl:
    """FlashAttention's implementation, of which the plugin takes prefill."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **layer: Any
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale, self.kv_cache_dtype = scale, layer["kv_cache_dtype"]
        self.alibi_slopes, self.logits_soft_cap = layer["alibi_slopes"], layer["logits_soft_cap"]

    forward = stub(
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    )


def get_current_vllm_config_or_none() -> Any:
    """Return the configuration of the engine that is built, here of none."""
    return None


class DeepseekSparseSWABackend(AttentionBackend):
    """The backend of the caches of recent tokens of DeepSeek-V4."""

    @staticmethod
    def get_builder_cls() -> Any:
        """Return the builder, which takes no part in the tests."""
        return SWAMetadataBuilder


class SWAMetadataBuilder(AttentionMetadataBuilder[Any]):
    """The builder of their batches."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        del kv_cache_spec, layer_names, device
        self.vllm_config = vllm_config


def get_forward_context() -> Any:
    """Fail, as outside of a step."""
    raise NotImplementedError


def flash_mla_with_kvcache(**_: Any) -> Any:
    """Fail, as without FlashMLA."""
    raise NotImplementedError


def compute_global_topk_indices_and_lens(
    topk_indices: Any, token_to_req_indices: Any, block_table: Any, block_size: int, is_valid: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the slots of compressed tokens of requests, and how many there are."""
    pages = block_table[token_to_req_indices.long()]
    slots = pages.gather(1, topk_indices.clamp(min=0).long() // block_size) * block_size
    slots = (slots + topk_indices % block_size).where(topk_indices >= 0, -1).int()
    return slots, ((topk_indices >= 0).sum(1) * is_valid).int()


class DeepseekV4FlashMLAAttention(torch.nn.Module):
    """A layer of DeepSeek-V4 whose decode the plugin replaces."""

    swa_backend_cls = DeepseekSparseSWABackend
    kv_cache: torch.Tensor
    swa_cache_layer: Any
    topk_indices_buffer: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    _alloc_attn_out = stub("self num_tokens hidden_states")
    _forward_prefill = stub(
        "self q positions compressed_k_cache swa_k_cache output attn_metadata swa_metadata"
    )

    def forward_mqa(self, q: Any, kv: Any, positions: Any, output: Any) -> None:
        """Attend with the tokens of a step, all of them of decode."""
        del kv, positions
        metadata = get_forward_context().attn_metadata
        attn_metadata = metadata.get("layer")
        self._forward_decode(
            q=q,
            kv_cache=self.kv_cache if attn_metadata else None,
            swa_metadata=metadata["layer.swa_cache"],
            attn_metadata=attn_metadata,
            swa_only=attn_metadata is None,
            output=output,
        )

    def _forward_decode(
        self,
        q: Any,
        kv_cache: Any,
        swa_metadata: Any,
        attn_metadata: Any,
        swa_only: bool,
        output: Any,
    ) -> None:
        indices: Any = None
        lengths: Any = None
        if not swa_only:
            indices, lengths = compute_global_topk_indices_and_lens(
                self.topk_indices_buffer[: len(q)],
                swa_metadata.token_to_req_indices,
                attn_metadata.block_table,
                kv_cache.shape[1],
                swa_metadata.is_valid_token,
            )
        flash_mla_with_kvcache(
            q=q.unsqueeze(1),
            k_cache=self.swa_cache_layer.kv_cache.unsqueeze(-2),
            block_table=None,
            head_dim_v=512,
            tile_scheduler_metadata=None,
            cache_seqlens=None,
            is_fp8_kvcache=True,
            indices=swa_metadata.decode_swa_indices,
            topk_length=swa_metadata.decode_swa_lens,
            softmax_scale=self.scale,
            attn_sink=self.attn_sink,
            extra_k_cache=None if swa_only else kv_cache.unsqueeze(-2),
            extra_indices_in_kvcache=None if swa_only else indices.unsqueeze(1),
            extra_topk_length=lengths,
            out=output.unsqueeze(1),
        )


def _select_dsv4_attn_cls(vllm_config: Any) -> Any:
    """Return the class of the layers, which a name that vLLM does not know leaves to FlashMLA."""
    del vllm_config
    return DeepseekV4FlashMLAAttention


class Registered:
    """An entry of the registry of models."""

    def inspect_model_cls(self) -> Any:
        """Return what is known of the model."""
        return "known"

    def load_model_cls(self) -> Any:
        """Return the class of the model."""
        return Registered


_DSV4_LAYERS = named(DeepseekV4FlashMLAAttention, _select_dsv4_attn_cls)
_DSV4_NAMES = ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM", "DeepseekV32ForCausalLM")

# The modules of vLLM with the names that the plugin and its tests import.
MODULES: dict[str, dict[str, Any]] = {
    "vllm.config": named(get_current_vllm_config_or_none),
    "vllm._custom_ops": named(cp_gather_and_upconvert_fp8_kv_cache),
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.model_executor.layers.attention.mla_attention": named(
        *(MLACommonBackend, MLACommonDecodeMetadata, MLACommonImpl, MLACommonMetadata),
        *(MLACommonMetadataBuilder, QueryLenSupport),
    ),
    "vllm.model_executor.layers.attention.sparse_mla_attention": named(
        SparseMLACommonImpl, SparseMLACommonMetadata, SparseMLACommonMetadataBuilder
    ),
    "vllm.forward_context": named(get_forward_context),
    "vllm.logger": named(init_logger),
    "vllm.model_executor.warmup.jit_warmup": named(VllmJitKernel),
    "vllm.model_executor.models.registry": {
        "ModelRegistry": SimpleNamespace(models={name: Registered() for name in _DSV4_NAMES})
    },
    "vllm.models.deepseek_v4.nvidia.model": dict(_DSV4_LAYERS),
    "vllm.models.deepseek_v41.nvidia.model": dict(_DSV4_LAYERS),
    "vllm.platforms": {"current_platform": current_platform},
    "vllm.platforms.interface": named(DeviceCapability),
    "vllm.utils.flashinfer": named(
        can_use_trtllm_attention, force_use_trtllm_attention, supports_trtllm_attention
    ),
    "vllm.utils.torch_utils": named(canonicalize_singleton_dim_strides),
    "vllm.v1.attention.backend": named(
        *(AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, AttentionType),
        *(CommonAttentionMetadata, MultipleOf, max_decode_query_len),
    ),
    "vllm.v1.attention.backends.flash_attn": named(FlashAttentionMetadataBuilder),
    "vllm.v1.attention.backends.flash_attn_diffkv": named(
        FlashAttentionDiffKVBackend, FlashAttentionDiffKVImpl
    ),
    "vllm.v1.attention.backends.flashinfer": named(
        *(FlashInferBackend, FlashInferDecodeKernel, FlashInferImpl, FlashInferMetadata),
        *(FlashInferMetadataBuilder, FlashInferTrtllmAPIDecode),
        *(_is_xqa_head_dim_supported, _nvfp4_kv_views),
    ),
    "vllm.v1.attention.backends.mla.sparse_utils": named(
        align_blocks_to_rows, flat_kv_row_view, triton_convert_req_index_to_global_index
    ),
    "vllm.v1.attention.backends.registry": named(AttentionBackendEnum),
    "vllm.v1.attention.backends.triton_attn": named(
        TritonAttentionBackend, TritonAttentionImpl, TritonAttentionMetadataBuilder
    ),
    "vllm.v1.attention.backends.utils": named(get_flashinfer_layout_string),
    "vllm.v1.kv_cache_interface": named(KVCacheLayout, KVQuantMode, is_quantized_kv_cache),
}
