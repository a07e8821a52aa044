"""The plugin's override against SGLang's class, and the stand-ins against an installed SGLang."""

from __future__ import annotations

from argparse import ArgumentParser
from importlib import metadata
from typing import Any

import pytest

from tests.integrations.servers import Import, is_installed
from tests.integrations.sglang.stand_in import MODULES
from tests.integrations.signatures import disagreements

MEMBERS = [
    pytest.param(module, name, member, id=f"{module}.{name}")
    for module, members in MODULES.items()
    for name, member in members.items()
]
needs_sglang = pytest.mark.skipif(
    not is_installed("sglang"), reason="needs SGLang: make test-sglang"
)


@pytest.mark.parametrize(
    ("module", "backend", "attributes", "own"),
    [
        ("mla", "MlagenMLABackend", [], []),
        ("dsa", "MlagenDSABackend", ["dsa_decode_impl"], []),
        ("mha", "MlagenMHABackend", ["is_xqa_impl"], ["_soft_cap"]),
        ("dsv4", "MlagenDSV4Backend", ["_flash_mla_with_kvcache"], []),
    ],
)
def test_the_override_has_the_parameters_of_the_overridden(
    sglang: Import, module: str, backend: str, attributes: list[str], own: list[str]
) -> None:
    """SGLang calls the decode kernel of the plugin as it calls its own, and sets attributes."""
    package = "mlagen.integrations.sglang"
    ours = getattr(sglang(f"{package}.{module}"), backend)
    differences = list(disagreements(ours, ours.__base__, package))
    assert differences == [f"{name}: missing" for name in [*attributes, *own]]
    if is_installed("sglang"):
        assert set(attributes) <= set(ours.__base__.__init__.__code__.co_names)


@needs_sglang
@pytest.mark.parametrize(("module", "name", "member"), MEMBERS)
def test_a_stand_in_is_as_in_sglang(sglang: Import, module: str, name: str, member: Any) -> None:
    """What stands in for SGLang has its names, signatures and kinds."""
    theirs = getattr(sglang(module), name)
    if isinstance(member, (dict, list)):
        assert type(theirs) is type(member)
    elif hasattr(member, "__code__") or isinstance(member, type):
        assert list(disagreements(member, theirs, "tests.integrations")) == []
    else:
        assert callable(theirs)


@needs_sglang
def test_sglang_finds_the_plugin(sglang: Import) -> None:
    """With mlagen installed beside it, SGLang loads the plugin, and its options have the name."""
    if "mlagen" not in {each.name for each in metadata.entry_points(group="sglang.srt.plugins")}:
        pytest.skip("needs an installed mlagen: make test-sglang")
    sglang("sglang.srt.plugins").load_plugins()

    registry = sglang("sglang.srt.layers.attention.attention_registry")
    assert {"mlagen_dsa", "mlagen_dsv4", "mlagen_mha", "mlagen_mla"} <= set(
        registry.ATTENTION_BACKENDS
    )
    parser = ArgumentParser()
    sglang("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    options = "--model-path model --page-size 64 --prefill-attention-backend fa3"
    parsed = parser.parse_args([*options.split(), "--decode-attention-backend", "mlagen_mla"])
    assert parsed.decode_attention_backend == "mlagen_mla"
