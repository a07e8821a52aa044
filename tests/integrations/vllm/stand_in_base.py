"""Classes in place of those of ``vllm.v1.attention.backend`` and of vLLM's registry."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from tests.integrations.servers import stub

Metadata = TypeVar("Metadata")
CompileKey = TypeVar("CompileKey")


class AttentionCGSupport(Enum):
    """Which batches a CUDA graph may hold."""

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionType(str, Enum):
    """Decoder, encoder or both."""

    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class DeviceCapability(NamedTuple):
    """A compute capability."""

    major: int
    minor: int


@dataclass(frozen=True)
class MultipleOf:
    """Any page size that is a multiple of a number."""

    base: int


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

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return page sizes."""
        del kv_cache_spec
        return [MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Return the page size where the user names none."""
        return default_block_size

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return head sizes."""
        return []

    @classmethod
    def is_mla(cls) -> bool:
        """Return whether it serves MLA."""
        return False

    @classmethod
    def is_sparse(cls) -> bool:
        """Return whether it takes top-k indices."""
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the spec of the cache."""
        return spec

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Return whether it serves a GPU."""
        del capability
        return True

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Return whether it serves a cache."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Return why not."""

    @classmethod
    def validate_configuration(cls, **call: Any) -> list[str]:
        """Return the reasons against a configuration, those that the tests provoke."""
        names = ["has_sink", "use_mm_prefix", "block_size", "use_mla", "use_sparse", "dtype"]
        names += ["head_size", "kv_cache_dtype", "device_capability"]
        combination = cls.supports_combination(**{name: call[name] for name in names})
        sizes = [getattr(size, "base", size) for size in cls.get_supported_kernel_block_sizes()]
        checks = {
            "head_size not supported": call["head_size"] in cls.get_supported_head_sizes(),
            "dtype not supported": call["dtype"] in cls.supported_dtypes,
            "kv_cache_dtype not supported": cls.supports_kv_cache_dtype(call["kv_cache_dtype"]),
            "block_size not supported": any(call["block_size"] % size == 0 for size in sizes),
            "compute capability not supported": cls.supports_compute_capability(
                call["device_capability"]
            ),
            "sparse not supported": cls.is_sparse() or not call["use_sparse"],
            "non-sparse not supported": call["use_sparse"] or not cls.is_sparse(),
        }
        reasons = [reason for reason, holds in checks.items() if not holds]
        return reasons + ([combination] if combination else [])


class AttentionMetadataBuilder(Generic[Metadata]):
    """The base class of builders."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: int = 1

    def _init_reorder_batch_threshold(
        self,
        reorder_batch_threshold: int | None = 1,
        supports_spec_as_decode: bool = False,
        supports_dcp_with_varlen: bool = False,
    ) -> None:
        self.reorder_batch_threshold = reorder_batch_threshold or 1
        if supports_spec_as_decode and supports_dcp_with_varlen:
            self.reorder_batch_threshold = max_decode_query_len(self.vllm_config)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Return the longest query of a captured batch."""

    vllm_config: Any


@dataclass
class CommonAttentionMetadata:
    """A batch as the model runner describes it to every builder."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None = None


def max_decode_query_len(vllm_config: Any) -> int:
    """Return the query tokens of a request with drafts."""
    return 1 + int(vllm_config.speculative_config.num_speculative_tokens)


class VerifyAndUpdateConfig:
    """The check of a model's configuration."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Check a configuration."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Check the part of the model."""


class VllmJitKernel(Generic[CompileKey]):
    """A kernel with a warm-up."""

    def __init__(self) -> None:
        self.registered = 0

    def register_warmup(self, *args: Any, **kwargs: Any) -> None:
        """Register it with the warm-up of the active runner; here there is none."""
        del args, kwargs
        self.registered += 1

    get_warmup_keys = stub("self", "args", "kwargs")
    compile = stub("self", "compile_key")
    compile_many = stub("self", "compile_keys")


def init_logger(name: str) -> logging.Logger:
    """Return a logger of vLLM's."""
    return logging.getLogger(name)
