"""The plugin's overrides against vLLM's classes, and the stand-ins against an installed vLLM."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from tests.integrations.servers import Import, is_installed
from tests.integrations.signatures import disagreements
from tests.integrations.vllm.conftest import GROUP, NAMED
from tests.integrations.vllm.stand_in import MODULES

MEMBERS = [
    pytest.param(module, member, id=f"{module}.{name}")
    for module, members in MODULES.items()
    for name, member in members.items()
    if hasattr(member, "__name__")  # a class or a function
]
needs_vllm = pytest.mark.skipif(not is_installed("vllm"), reason="needs vLLM: make test-vllm")


@pytest.mark.parametrize(
    ("module", "name", "new"),
    [
        ("dense", "MlagenMLABackend", NAMED),
        ("dense", "MlagenMLAMetadataBuilder", {"__init__", *GROUP}),  # as all builders are called
        ("dense", "MlagenMLAImpl", {"_dcp_keywords"}),
        ("sparse", "MlagenSparseMLABackend", NAMED),
        ("sparse", "MlagenSparseMLAMetadataBuilder", {"metadata_cls", "converts", *GROUP}),
        ("sparse", "MlagenSparseMLAMetadata", {"conversion"}),
        ("sparse", "MlagenSparseMLAImpl", {"__init__"}),
        ("gqa", "MlagenGQABackend", NAMED),
        ("gqa", "MlagenGQAMetadataBuilder", GROUP),
        ("gqa", "MlagenGQAImpl", {"__init__", "_init", "_decode", "_for_flashinfer", "_views"}),
        ("diffkv", "MlagenDiffKVBackend", NAMED),
        ("diffkv", "MlagenDiffKVMetadataBuilder", {"__init__", "kv_dtype", *GROUP}),
        ("diffkv", "MlagenDiffKVImpl", {"__init__", "_decode", "cache_of"}),
        ("token_scales", "MlagenTokenScalesBackend", NAMED),
        ("token_scales", "MlagenTokenScalesMetadataBuilder", {"__init__", "kv_dtype", *GROUP}),
        ("token_scales", "MlagenTokenScalesImpl", {"__init__", "_decode", "cache_of"}),
    ],
)
def test_an_override_has_the_parameters_of_the_overridden(
    vllm: Import, module: str, name: str, new: set[str]
) -> None:
    """VLLM calls every method of the plugin's classes as it calls its own."""
    if module == "gqa" and is_installed("vllm"):
        pytest.importorskip("flashinfer", reason="vLLM's FlashInfer backend needs flashinfer")
    package = "mlagen.integrations.vllm"
    ours = getattr(vllm(f"{package}.{module}"), name)
    base = next(each for each in ours.__mro__ if not each.__module__.startswith(package))

    found = set(disagreements(ours, base, package))

    # vLLM annotates some members of its classes without giving them a value.
    assert {each.partition(":")[0] for each in found} <= new


@needs_vllm
@pytest.mark.parametrize(("module", "member"), MEMBERS)
def test_a_stand_in_is_as_in_vllm(vllm: Import, module: str, member: Any) -> None:
    """The classes that stand in for vLLM's have their signatures, fields and values."""
    if module.endswith("flashinfer"):
        pytest.importorskip("flashinfer", reason="vLLM's FlashInfer backend needs flashinfer")
    theirs = getattr(vllm(module), member.__name__)
    assert list(disagreements(member, theirs, "tests.integrations")) == []


@needs_vllm
def test_vllm_finds_the_plugin(vllm: Import) -> None:
    """With mlagen installed beside it, vLLM loads the plugin, and its option has the names."""
    if "mlagen" not in {each.name for each in metadata.entry_points(group="vllm.general_plugins")}:
        pytest.skip("needs an installed mlagen: make test-vllm")
    vllm("vllm.plugins").load_general_plugins()

    registry = vllm("vllm.v1.attention.backends.registry").AttentionBackendEnum
    assert set(vllm("mlagen.integrations.vllm").BACKENDS) <= set(registry.__members__)
    config = vllm("vllm.config.attention").AttentionConfig(backend="mlagen_mla")
    assert config.backend.name == "MLAGEN_MLA"
