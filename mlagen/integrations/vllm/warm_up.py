"""Warm-up of a vLLM worker: its layers' kernels are compiled and loaded before the first request.

vLLM runs what is registered with its JIT warm-up once all layers and caches are built, before it
captures graphs. Without that warm-up, as with ``--enforce-eager``, each group of layers warms up as
soon as it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from vllm.logger import init_logger
from vllm.model_executor.warmup.jit_warmup import VllmJitKernel
from vllm.v1.attention.backend import AttentionCGSupport, max_decode_query_len

from mlagen.integrations.warm_up import Calls, gqa_calls, mla_calls, warm_up
from mlagen.models.kernels import PAGE_SIZES, page_size_of
from mlagen.spec.mla.variant import MlaVariant

_SWA_CACHE = ".swa_cache"  # ends the name of the cache of recent tokens of a layer of DeepSeek-V4
_logger = init_logger("vllm.mlagen")  # of vLLM's loggers, which show INFO


class Named:
    """Beside a backend of vLLM: its name and its classes."""

    name: ClassVar[str]  # that ``--attention-backend`` takes
    impl: ClassVar[type]  # computes attention
    builder: ClassVar[type]  # of the metadata of a batch

    @classmethod
    def get_name(cls) -> str:
        """Return the name."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type:
        """Return the class that computes attention."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        """Return the class that builds the metadata of a batch."""
        return cls.builder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes that prewarming compiles, into which vLLM splits larger blocks."""
        del kv_cache_spec
        return list(PAGE_SIZES)


class Group:
    """Beside a builder of vLLM, which is that of a group of layers with one KV cache."""

    kv_cache_spec: Any
    vllm_config: Any
    layer_names: list[str]

    def add_to_warm_up(self, layer_names: list[str]) -> None:
        """Add the group, whose layers, or their caches, have these names."""
        self.layer_names = layer_names
        WARM_UP.add(self)

    @property
    def layers(self) -> list[Any]:
        """The layers of the group."""
        known = self.vllm_config.compilation_config.static_forward_context
        return [known[name.removesuffix(_SWA_CACHE)] for name in self.layer_names]

    def decode_calls(self) -> Iterable[Calls]:
        """Return the calls of mlagen that decode the batches of the group."""
        raise NotImplementedError

    def warm_up_prefill(self) -> None:
        """Compile what another library prefills with; of most groups vLLM does."""


class WarmedGroup(Group):
    """A group that is added once its builder is made."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.add_to_warm_up(layer_names)


class WarmUp(VllmJitKernel[Calls]):
    """The kernels of the groups of layers of this process, as vLLM's registry has them."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: WeakSet[Group] = WeakSet()  # also of drafts; not those of a profiling run
        self.warm: set[Calls] = set()

    def add(self, group: Group) -> None:
        """Add a group, and warm it up at once if vLLM runs no warm-up."""
        self.groups.add(group)
        if not group.vllm_config.kernel_config.enable_jit_warmup:
            self._warm_up(group.decode_calls(), [group])

    def get_warmup_keys(self) -> list[Calls]:
        """Return the calls of all groups."""
        return list(dict.fromkeys(call for group in self.groups for call in group.decode_calls()))

    def compile(self, compile_key: Calls) -> None:
        """Compile and load the kernels of one call."""
        self.compile_many([compile_key])

    def compile_many(self, compile_keys: Iterable[Calls]) -> None:
        """Compile and load the kernels of calls, and say so in one line."""
        self._warm_up(compile_keys, list(self.groups))

    def _warm_up(self, calls: Iterable[Calls], groups: list[Group]) -> None:
        for group in groups:
            group.warm_up_prefill()
        new = dict.fromkeys(call for call in calls if call not in self.warm)
        if new:  # groups have equal layers
            warm_up(new, torch.cuda.current_device(), _logger.info)
            self.warm |= new.keys()


WARM_UP = WarmUp()


class MlaGroup(Group):
    """Beside a builder of MLA batches. Graphs hold batches of decode, of any query lengths."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    reorder_batch_threshold: int
    dcp_world_size: int
    is_sparse: bool

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Return the longest query of a captured batch, whose query lengths may vary."""
        del kv_cache_spec
        return int(max_decode_query_len(vllm_config))

    def decode_calls(self) -> Iterable[tuple[MlaVariant, int]]:
        """Return the calls of mlagen that decode the batches of the group."""
        for impl in (layer.impl for layer in self.layers):
            query_dtype, kv_dtype = self._dtypes_of(impl)
            yield from mla_calls(
                heads=impl.num_heads * self.dcp_world_size,  # the query is gathered
                kv_lora_rank=impl.kv_lora_rank,
                qk_rope_head_dim=impl.qk_rope_head_dim,
                page_size=page_size_of(self.kv_cache_spec.block_size),
                query_dtype=query_dtype,
                kv_dtype=kv_dtype,
                max_q_len=self.reorder_batch_threshold,
                is_sparse=self.is_sparse,
                dcp_size=self.dcp_world_size,
            )

    def _dtypes_of(self, impl: Any) -> tuple[torch.dtype, torch.dtype]:
        model_dtype = self.vllm_config.model_config.dtype
        if impl.kv_cache_dtype == "fp8_ds_mla":
            return model_dtype, torch.uint8
        if impl.kv_cache_dtype.startswith("fp8"):
            is_quantized = impl.supports_quant_query_input
            return (torch.float8_e4m3fn if is_quantized else model_dtype), torch.float8_e4m3fn
        return model_dtype, self.kv_cache_spec.dtype


@cache
def warmed_backend_of(theirs: Any, calls_of: Callable[[Any], Iterable[Calls]]) -> Any:
    """Return vLLM's backend of some layers, whose builder warms up ``calls_of`` itself."""

    class MlagenMetadataBuilder(WarmedGroup, theirs.get_builder_cls()):  # type: ignore[misc]
        def decode_calls(self) -> Iterable[Calls]:
            """Return the calls of mlagen for the layers of the group."""
            return calls_of(self)

    class MlagenBackend(theirs):
        @staticmethod
        def get_builder_cls() -> Any:
            """Return the class that builds the metadata of a batch."""
            return MlagenMetadataBuilder

    return MlagenBackend


def sparse_gqa_calls(
    group: Group, call_of: Callable[[Any, Any, torch.dtype], dict[str, Any]]
) -> Iterable[Calls]:
    """Yield the calls of sparse layers of grouped-query attention.

    ``call_of`` returns what :func:`gqa_calls` takes besides the heads and the query, for an
    implementation, the specification of its cache, and the dtype of the model.
    """
    dtype = group.vllm_config.model_config.dtype
    for impl in (layer.impl for layer in group.layers):
        yield from gqa_calls(
            heads=impl.num_heads,
            kv_heads=impl.num_kv_heads,
            head_dim=impl.head_size,
            query_dtype=dtype,
            **call_of(impl, group.kv_cache_spec, dtype),
        )
