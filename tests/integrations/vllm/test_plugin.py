"""What vLLM's registry and its validation say of the backends."""

from __future__ import annotations

import os
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.models.kernels import PAGE_SIZES, page_size_of
from mlagen.settings import current_settings
from tests.fixture_types import Patch
from tests.integrations.servers import Import, is_installed
from tests.integrations.vllm.conftest import ImplOf

Backends = dict[str, Any]


@pytest.fixture
def backends(vllm: Import) -> Backends:
    """Return the classes of the registered names, as vLLM resolves them."""
    plugin = vllm("mlagen.integrations.vllm")
    registry = vllm("vllm.v1.attention.backends.registry").AttentionBackendEnum
    plugin.register()
    plugin.register()  # vLLM may load plugins more than once
    return {name: registry.__members__[name].get_class() for name in plugin.BACKENDS}


def reasons(vllm: Import, backend: Any, **configuration: Any) -> Any:
    """Return vLLM's reasons against a backend for a model on Hopper, or on another GPU."""
    capability = vllm("vllm.platforms.interface").DeviceCapability
    call = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "use_sparse": backend.is_sparse(),
        "has_sink": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "attn_type": "decoder",
        **{"device_capability": (9, 0)} | configuration,
    }
    call["device_capability"] = capability(*call["device_capability"])
    return backend.validate_configuration(**call)


def test_each_name_is_the_backend_of_that_name(backends: Backends) -> None:
    """A backend calls itself by its name, and has an implementation and a builder of its kind."""
    assert set(backends) == {
        *("MLAGEN_MLA", "MLAGEN_MLA_SPARSE", "MLAGEN_GQA", "MLAGEN_GQA_TOKEN_SCALES"),
        "MLAGEN_GQA_DIFFKV",
    }
    for name, backend in backends.items():
        assert backend.get_name() == name
    for name, prefix in (("MLAGEN_MLA", "MlagenMLA"), ("MLAGEN_MLA_SPARSE", "MlagenSparseMLA")):
        assert backends[name].get_impl_cls().__name__ == f"{prefix}Impl"
        assert backends[name].get_builder_cls().__name__ == f"{prefix}MetadataBuilder"


ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    *(
        ("MLAGEN_MLA", {"head_size": size, "kv_cache_dtype": dtype, "block_size": 16})
        for size, dtype in product((320, 512, 576), ("auto", "bfloat16", "fp8", "fp8_e4m3"))
    ),
    *(
        ("MLAGEN_MLA_SPARSE", {"head_size": size, "kv_cache_dtype": dtype})
        for size, dtypes in product((576, 512), [("auto", "bfloat16", "fp8", "fp8_ds_mla")])
        for dtype in dtypes
    ),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MLAGEN_MLA", {"head_size": 640}, "head_size not supported"),
    ("MLAGEN_MLA", {"block_size": 8}, "block_size not supported"),
    ("MLAGEN_MLA", {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
    ("MLAGEN_MLA", {"dtype": torch.float32}, "dtype not supported"),
    ("MLAGEN_MLA", {"use_sparse": True}, "sparse not supported"),
    ("MLAGEN_MLA", {"device_capability": (7, 5)}, "compute capability not supported"),
    ("MLAGEN_MLA_SPARSE", {"head_size": 320}, "head_size not supported"),
    ("MLAGEN_MLA_SPARSE", {"use_sparse": False}, "non-sparse not supported"),
]


@pytest.mark.parametrize(
    ("name", "call", "reason"), [*((*each, None) for each in ACCEPTED), *REFUSED]
)
def test_the_reason_against_a_backend(
    vllm: Import, backends: Backends, name: str, call: dict[str, Any], reason: str | None
) -> None:
    """VLLM refuses at start-up what no kernel has, says why, and finds no reason against others."""
    found = reasons(vllm, backends[name], **call)

    assert reason in found if reason else found == []


LAYERS: list[tuple[str, dict[str, Any], bool]] = [
    *(("dense", {"rope": rope}, True) for rope in (64, 0)),
    *(("sparse", {"rope": rope, "kv_cache_dtype": "fp8"}, True) for rope in (64, 0)),
    ("sparse", {"kv_cache_dtype": "fp8_ds_mla"}, False),
]
IMPLS = {"dense": "MlagenMLAImpl", "sparse": "MlagenSparseMLAImpl"}


@pytest.mark.parametrize(("module", "layer", "is_quantized"), LAYERS)
def test_the_query_is_quantized_where_a_kernel_takes_it(
    vllm: Import, impl_of: ImplOf, module: str, layer: dict[str, Any], is_quantized: bool
) -> None:
    """VLLM quantizes the query for an FP8 cache, and leaves it in 16 bits for fp8_ds_mla rows."""
    impl_class = getattr(vllm(f"mlagen.integrations.vllm.{module}"), IMPLS[module])
    assert impl_of(impl_class, **layer).supports_quant_query_input is is_quantized


@pytest.mark.parametrize("feature", ["alibi_slopes", "sliding_window", "logits_soft_cap"])
@pytest.mark.parametrize("module", IMPLS)
def test_a_feature_without_a_kernel_is_refused(
    vllm: Import, impl_of: ImplOf, module: str, feature: str
) -> None:
    """A layer with a feature that no kernel has fails at start-up, and says which."""
    impl_class = getattr(vllm(f"mlagen.integrations.vllm.{module}"), IMPLS[module])
    with pytest.raises(NotImplementedError, match=feature):
        impl_of(impl_class, **{feature: 128})


@pytest.mark.parametrize(
    ("capability", "is_served"), [((9, 0), True), ((8, 0), False), ((10, 0), False)]
)
def test_the_gqa_backend_is_for_hopper(
    vllm: Import, backends: Backends, capability: tuple[int, int], is_served: bool
) -> None:
    """The GQA backend serves the GPU on which vLLM calls XQA and mlagen has a kernel for it."""
    gpu = vllm("vllm.platforms.interface").DeviceCapability(*capability)
    backend = backends["MLAGEN_GQA"]
    assert backend.supports_compute_capability(gpu) is is_served
    assert backend.supports_kv_cache_dtype("fp8_e4m3")
    assert backend.supports_kv_cache_dtype("nvfp4")
    assert not backend.supports_kv_cache_dtype("int8_per_token_head")


@pytest.mark.parametrize("name", ["MLAGEN_GQA", "MLAGEN_GQA_DIFFKV", "MLAGEN_GQA_TOKEN_SCALES"])
def test_a_head_size_without_a_kernel_is_refused(backends: Backends, name: str) -> None:
    """A backend whose base serves more dims says so before a request comes."""
    served = [size for size in (72, 120, 128, 288, 384) if backends[name].supports_head_size(size)]
    assert served == [128]


@pytest.mark.parametrize("variable", [None, "0", "1"])
@pytest.mark.parametrize("is_on", [False, True])
def test_the_mode_of_vllm_makes_decode_batch_invariant(
    vllm: Import, backends: Backends, is_on: bool, variable: str | None, monkeypatch: Patch
) -> None:
    """Unless the environment of mlagen says otherwise, when vLLM refuses the backend."""
    monkeypatch.setattr(vllm("vllm.envs"), "VLLM_BATCH_INVARIANT", is_on, raising=False)
    monkeypatch.delenv("MLAGEN_BATCH_INVARIANT", raising=False)
    if variable is not None:
        monkeypatch.setenv("MLAGEN_BATCH_INVARIANT", variable)
    expected = variable == "1" or (is_on and variable is None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        current_settings.cache_clear()
        for name in ("MLAGEN_MLA", "MLAGEN_MLA_SPARSE", "MLAGEN_GQA"):
            assert backends[name].supports_batch_invariance() is expected
        assert current_settings().batch_invariant is expected
    assert not backends["MLAGEN_GQA_DIFFKV"].supports_batch_invariance()


@pytest.mark.parametrize("name", ["MLAGEN_MLA", "MLAGEN_MLA_SPARSE"])
def test_a_cuda_graph_holds_uniform_and_ragged_drafts(
    vllm: Import, backends: Backends, name: str
) -> None:
    """A graph of uniform batches replays batches whose requests have up to as many tokens."""
    support = vllm("vllm.v1.attention.backend").AttentionCGSupport
    builder = backends[name].get_builder_cls()
    speculative = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    config = SimpleNamespace(speculative_config=speculative)
    assert builder._cudagraph_support is support.UNIFORM_BATCH
    assert builder.get_varlen_cudagraph_max_query_len(config, None) == 4


def test_pages_have_64_tokens_where_the_user_names_no_size(backends: Backends) -> None:
    """The page size of the kernels' KV blocks is preferred over vLLM's default of 16."""
    assert backends["MLAGEN_MLA"].get_preferred_block_size(16) == 64


@pytest.mark.skipif(not is_installed("vllm"), reason="needs vLLM: make test-vllm")
@pytest.mark.parametrize("name", ["MLAGEN_MLA", "MLAGEN_GQA"])
@pytest.mark.parametrize("block_size", [16, 64, 128, 528, 544, 1152])
def test_vllm_splits_inflated_blocks_into_pages(
    vllm: Import, backends: Backends, name: str, block_size: int
) -> None:
    """A block of a hybrid model, of a size by its recurrent state, has pages that are prewarmed."""
    select = vllm("vllm.v1.worker.utils").select_common_block_size
    assert select(block_size, [backends[name]]) == page_size_of(block_size)


@pytest.mark.parametrize(
    "name", ["MLAGEN_MLA", "MLAGEN_GQA", "MLAGEN_GQA_TOKEN_SCALES", "MLAGEN_GQA_DIFFKV"]
)
def test_the_page_sizes_are_those_that_prewarming_compiles(backends: Backends, name: str) -> None:
    """No size is a multiple of another number, which would make a whole block a page."""
    assert backends[name].get_supported_kernel_block_sizes() == list(PAGE_SIZES)
