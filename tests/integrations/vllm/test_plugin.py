"""What vLLM's registry and its validation say of the backends."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def backends(vllm: Callable[[str], ModuleType]) -> dict[str, Any]:
    """Return the classes of the registered names, as vLLM resolves them."""
    plugin = vllm("mlagen.integrations.vllm")
    registry = vllm("vllm.v1.attention.backends.registry").AttentionBackendEnum
    plugin.register()
    plugin.register()  # vLLM may load plugins more than once
    return {name: registry.__members__[name].get_class() for name in plugin.BACKENDS}


def reasons(vllm: Callable[[str], ModuleType], backend: Any, **configuration: Any) -> Any:
    """Return vLLM's reasons against a backend for a model on Hopper."""
    hopper = vllm("vllm.platforms.interface").DeviceCapability(9, 0)
    call = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": backend.is_sparse(),
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": hopper,
        "attn_type": "decoder",
    }
    return backend.validate_configuration(**call | configuration)


def test_each_name_is_the_backend_of_that_name(backends: dict[str, Any]) -> None:
    """A backend that a name resolves to calls itself by that name, as vLLM looks it up again."""
    assert {name: backend.get_name() for name, backend in backends.items()} == {
        name: name for name in ("MLAGEN_MLA", "MLAGEN_MLA_SPARSE", "MLAGEN_GQA")
    }


@pytest.mark.parametrize("head_size", [320, 512, 576])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3"])
def test_the_dense_backend_is_accepted(
    vllm: Callable[[str], ModuleType], backends: dict[str, Any], head_size: int, kv_cache_dtype: str
) -> None:
    """VLLM finds no reason against a head size and a cache that kernels have."""
    call = {"head_size": head_size, "kv_cache_dtype": kv_cache_dtype, "block_size": 16}
    assert reasons(vllm, backends["MLAGEN_MLA"], **call) == []


@pytest.mark.parametrize(
    ("name", "configuration", "reason"),
    [
        ("MLAGEN_MLA", {"head_size": 640}, "head_size not supported"),
        ("MLAGEN_MLA", {"block_size": 8}, "block_size not supported"),
        ("MLAGEN_MLA", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ("MLAGEN_MLA", {"dtype": torch.float32}, "dtype not supported"),
        ("MLAGEN_MLA", {"use_sparse": True}, "sparse not supported"),
        ("MLAGEN_MLA", {"device_capability": (7, 5)}, "compute capability not supported"),
        ("MLAGEN_MLA_SPARSE", {"head_size": 320}, "head_size not supported"),
        ("MLAGEN_MLA_SPARSE", {"use_sparse": False}, "non-sparse not supported"),
        (
            "MLAGEN_MLA_SPARSE",
            {"head_size": 512, "kv_cache_dtype": "fp8_ds_mla"},
            "fp8_ds_mla has rows of head size 576, not 512",
        ),
    ],
)
def test_the_reason_against_a_backend(
    vllm: Callable[[str], ModuleType],
    backends: dict[str, Any],
    name: str,
    configuration: dict[str, Any],
    reason: str,
) -> None:
    """VLLM refuses what no kernel has at start-up, and says why."""
    if capability := configuration.get("device_capability"):
        older = vllm("vllm.platforms.interface").DeviceCapability(*capability)
        configuration = configuration | {"device_capability": older}
    assert reason in reasons(vllm, backends[name], **configuration)


@pytest.mark.parametrize(
    ("head_size", "kv_cache_dtype"),
    [(576, "auto"), (576, "fp8"), (576, "fp8_ds_mla"), (512, "bfloat16"), (512, "fp8")],
)
def test_the_sparse_backend_is_accepted(
    vllm: Callable[[str], ModuleType], backends: dict[str, Any], head_size: int, kv_cache_dtype: str
) -> None:
    """VLLM finds no reason against the rows that sparse kernels have."""
    call = {"head_size": head_size, "kv_cache_dtype": kv_cache_dtype}
    assert reasons(vllm, backends["MLAGEN_MLA_SPARSE"], **call) == []


@pytest.mark.parametrize(
    ("capability", "is_served"), [((9, 0), True), ((8, 0), False), ((10, 0), False)]
)
def test_the_gqa_backend_is_for_hopper(
    vllm: Callable[[str], ModuleType],
    backends: dict[str, Any],
    capability: tuple[int, int],
    is_served: bool,
) -> None:
    """The GQA backend serves the GPU on which vLLM calls XQA and mlagen has a kernel for it."""
    gpu = vllm("vllm.platforms.interface").DeviceCapability(*capability)
    backend = backends["MLAGEN_GQA"]
    assert backend.supports_compute_capability(gpu) is is_served
    assert backend.supports_kv_cache_dtype("fp8_e4m3")
    assert not backend.supports_kv_cache_dtype("nvfp4")


@pytest.mark.parametrize("name", ["MLAGEN_MLA", "MLAGEN_MLA_SPARSE"])
def test_a_cuda_graph_holds_uniform_and_ragged_drafts(
    vllm: Callable[[str], ModuleType], backends: dict[str, Any], name: str
) -> None:
    """A graph of uniform batches replays batches whose requests have up to as many tokens."""
    support = vllm("vllm.v1.attention.backend").AttentionCGSupport
    builder = backends[name].get_builder_cls()
    speculative = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    config = SimpleNamespace(speculative_config=speculative)
    assert builder._cudagraph_support is support.UNIFORM_BATCH
    assert builder.get_varlen_cudagraph_max_query_len(config, None) == 4


def test_layers_and_batches_are_of_the_backend(backends: dict[str, Any]) -> None:
    """Each backend has an implementation and a builder of its own kind."""
    for name, prefix in (("MLAGEN_MLA", "MlagenMLA"), ("MLAGEN_MLA_SPARSE", "MlagenSparseMLA")):
        assert backends[name].get_impl_cls().__name__ == f"{prefix}Impl"
        assert backends[name].get_builder_cls().__name__ == f"{prefix}MetadataBuilder"


def test_pages_have_64_tokens_where_the_user_names_no_size(backends: dict[str, Any]) -> None:
    """The page size of the kernels' KV blocks is preferred over vLLM's default of 16."""
    assert backends["MLAGEN_MLA"].get_preferred_block_size(16) == 64
