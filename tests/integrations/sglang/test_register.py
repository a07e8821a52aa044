"""``register`` with SGLang's registries, and with versions that lack a part of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixture_types import Log, Patch
from tests.integrations.servers import Import, is_installed

NAMES = ("mlagen_mha", "mlagen_mla", "mlagen_dsa", "mlagen_dsv4")
SRT = "sglang.srt"
CHOICES = f"{SRT}.arg_groups.choices"
CHECKS = f"{SRT}.arg_groups.model_hook"
OVERRIDES = f"{SRT}.arg_groups.model_override_base"
REGISTRY = f"{SRT}.layers.attention.attention_registry"
NEEDED = {
    CHOICES: (
        "ATTENTION_BACKEND_CHOICES",
        "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS",
        "add_attention_backend_choices",
        "add_chunked_prefix_cache_attention_backend",
    ),
    CHECKS: ("attention_backends_of",),
    OVERRIDES: ("register_model_override_predicate",),
    REGISTRY: ("ATTENTION_BACKENDS", "register_attention_backend"),
}
FUNCTIONS = [(module, name) for module, names in NEEDED.items() for name in names if name.islower()]


def lists_of(sglang: Import) -> dict[str, Any]:
    """Return what SGLang has of backends, in copies."""
    choices, registry = sglang(CHOICES), sglang(REGISTRY)
    return {
        "choices": list(choices.ATTENTION_BACKEND_CHOICES),
        "chunked": list(choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS),
        "backends": dict(registry.ATTENTION_BACKENDS),
        "checked": sglang(CHECKS).attention_backends_of,
        "providers": list(sglang(OVERRIDES)._PREDICATE_OVERRIDE_FNS),
    }


def is_provider(entry: Any) -> bool:
    """Return whether an entry of a list decides options for models, and is ours."""
    return isinstance(entry, tuple) and entry[1].__module__.startswith("mlagen.")


@pytest.fixture
def register(sglang: Import, monkeypatch: Patch) -> Iterator[Callable[[], None]]:
    """Return the registration, in a process that has not registered yet."""
    choices, registry, checks = (sglang(each) for each in (CHOICES, REGISTRY, CHECKS))
    lists = (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
        sglang(OVERRIDES)._PREDICATE_OVERRIDE_FNS,
    )
    kept, backends = [list(each) for each in lists], dict(registry.ATTENTION_BACKENDS)
    for each in lists:
        each[:] = [name for name in each if name not in NAMES and not is_provider(name)]
    for name in NAMES:
        registry.ATTENTION_BACKENDS.pop(name, None)
    theirs = getattr(checks.attention_backends_of, "__wrapped__", checks.attention_backends_of)
    monkeypatch.setattr(checks, "attention_backends_of", theirs)
    servers = sglang("mlagen.integrations.servers")
    monkeypatch.setattr(servers, "version_of", lambda _: "0.5.23")
    yield sglang("mlagen.integrations.sglang").register
    for each, old in zip(lists, kept, strict=True):
        each[:] = old
    registry.ATTENTION_BACKENDS.clear()
    registry.ATTENTION_BACKENDS.update(backends)


def test_the_backends_are_registered_without_a_word(
    sglang: Import, register: Callable[[], None], caplog: Log
) -> None:
    """However often SGLang loads the plugin in a process, each name is there once."""
    with caplog.at_level(logging.WARNING, logger="mlagen"):
        for _ in range(2):
            register()

    has = lists_of(sglang)
    assert [has["choices"].count(name) for name in NAMES] == [1] * len(NAMES)
    assert set(NAMES) <= set(has["backends"])
    assert has["chunked"].count("mlagen_mla") == 1
    assert caplog.records == []


MISSING, NONE_KEPT = object(), f"lists without {', '.join(NAMES)}"
# What another SGLang has under names of the one that is known, and a word of the warning. A call
# that fails or keeps nothing, or an undo that fails, ends no server.
OTHERS: dict[str, tuple[dict[tuple[str, str], Any], str]] = {
    f"without {module}.{name}": ({(module, name): MISSING}, name)
    for module, names in NEEDED.items()
    for name in names
}
for module, name in FUNCTIONS:
    if module != CHECKS:
        OTHERS[f"{name} without an argument"] = {(module, name): lambda: None}, "TypeError"
        OTHERS[f"{name} with another"] = {(module, name): lambda *_, kind: kind}, "TypeError"
OTHERS["choices that keep no name"] = (
    {(CHOICES, "add_attention_backend_choices"): lambda *_: None},
    NONE_KEPT,
)
OTHERS["a registry that keeps no name"] = (
    {(REGISTRY, "register_attention_backend"): lambda _: lambda _: None},
    NONE_KEPT,
)
OTHERS["no function that checks"] = {(CHECKS, "attention_backends_of"): None}, "Error: "
OTHERS["a list of backends"] = (
    {
        (REGISTRY, "ATTENTION_BACKENDS"): [],
        (REGISTRY, "register_attention_backend"): lambda _: id,
    },
    "Error: ",
)
for kind in (tuple, set, frozenset):
    OTHERS[f"a {kind.__name__} of choices"] = (
        {
            (CHOICES, "ATTENTION_BACKEND_CHOICES"): kind(["triton"]),
            (CHOICES, "add_attention_backend_choices"): lambda _: None,
        },
        NONE_KEPT,
    )


@pytest.mark.parametrize("other", [*NEEDED, *OTHERS])
def test_another_sglang_is_one_warning(
    sglang: Import, register: Callable[[], None], caplog: Log, monkeypatch: Patch, other: str
) -> None:
    """Where a module or a name is missing or another, the server starts without our backends."""
    before = lists_of(sglang)
    changes, reason = OTHERS.get(other, ({}, "Error: "))
    with monkeypatch.context() as patch:
        for (module, name), value in changes.items():
            if value is MISSING:
                patch.delattr(sys.modules[module], name)
            else:
                patch.setattr(sys.modules[module], name, value)
        if other in NEEDED:
            package, _, leaf = other.rpartition(".")
            patch.setitem(sys.modules, other, None)
            patch.delattr(sys.modules[package], leaf)
        with caplog.at_level(logging.WARNING, logger="mlagen"):
            register()
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("sglang 0.5.23: expected sglang.srt.arg_groups (choices, ")
    assert reason in message
    assert lists_of(sglang) == before


def test_a_later_check_of_backends_is_passed_on(
    sglang: Import, register: Callable[[], None], monkeypatch: Patch
) -> None:
    """Its arguments and results may be others."""
    monkeypatch.setattr(sglang(CHECKS), "attention_backends_of", lambda cfg, *, kind: {cfg: kind})
    register()
    assert sglang(CHECKS).attention_backends_of("cfg", kind=1) == {"cfg": 1}


@pytest.mark.parametrize(
    ("options", "warned", "kept"),
    [
        ({"attention_backend": "mlagen_dsv4"}, [], {"attention_backend": "mlagen_dsv4"}),
        ({"attention_backend": "mlagen_dsa"}, ["--attention-backend: ", "got mlagen_dsa"], {}),
        (
            {"decode_attention_backend": "mlagen_mla"},
            ["--decode-attention-backend: ", "mlagen_mla"],
            {},
        ),
        ({"attention_backend": "dsv4", "decode_attention_backend": None}, [], {}),
        ({}, [], {}),
    ],
)
@pytest.mark.parametrize("architecture", ["DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN"])
def test_deepseek_v4_takes_one_backend_of_mlagen(
    sglang: Import,
    register: Callable[[], None],
    caplog: Log,
    architecture: str,
    options: dict[str, Any],
    warned: list[str],
    kept: dict[str, str],
) -> None:
    """SGLang overrides the option there, so one name is kept, and the log says who else decodes."""
    register()
    providers = sglang(OVERRIDES)._PREDICATE_OVERRIDE_FNS
    config = SimpleNamespace(architectures=[architecture])

    given = [
        provider(SimpleNamespace(**options), config)
        for predicate, provider in filter(is_provider, providers)
        if predicate(architecture)
    ]

    assert given == [kept]
    assert len(caplog.messages) == bool(warned)
    assert all(each in caplog.text for each in [*warned, "mlagen_dsv4" if warned else ""])


@pytest.mark.skipif(not is_installed("sglang"), reason="needs SGLang: make test-sglang")
def test_the_name_is_declared_after_the_one_of_sglang(
    sglang: Import, register: Callable[[], None], monkeypatch: Patch
) -> None:
    """The last declaration of an option holds."""
    register()
    overrides = sglang("sglang.srt.arg_groups.overrides")
    theirs = sglang("sglang.srt.arg_groups.model_overrides.deepseek_v4")
    monkeypatch.setattr(theirs, "resolving_view", lambda arguments: arguments)
    options = {"device": "cuda", "moe_runner_backend": "triton", "swa_full_tokens_ratio": 0.1}
    arguments = SimpleNamespace(attention_backend="mlagen_dsv4", **options)
    config = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4")

    declared = overrides.collect_model_override_declarations(
        "DeepseekV4ForCausalLM", arguments, config
    )

    named = [each["attention_backend"] for _, each in declared if "attention_backend" in each]
    assert named == ["dsv4", "mlagen_dsv4"]


def test_other_models_have_no_such_warning(sglang: Import, register: Callable[[], None]) -> None:
    """DeepSeek-V3.2 is served."""
    register()
    providers = sglang(OVERRIDES)._PREDICATE_OVERRIDE_FNS
    ours = filter(is_provider, providers)
    assert [predicate("DeepseekV32ForCausalLM") for predicate, _ in ours] == [False]


def test_models_with_a_list_of_backends_take_the_gqa_backend(
    sglang: Import, register: Callable[[], None]
) -> None:
    """gpt-oss and Gemma 4 accept ``trtllm_mha``, which ``mlagen_mha`` is for their checks."""
    register()
    options = dict.fromkeys(("attention_backend", "prefill_attention_backend"), "fa3")
    checked = sglang(CHECKS).attention_backends_of

    backends = [
        checked(SimpleNamespace(**options, decode_attention_backend=name))
        for name in (*NAMES, "triton", None)
    ]

    decoded = ["trtllm_mha", "mlagen_mla", "mlagen_dsa", "mlagen_dsv4", "triton", "fa3"]
    assert backends == [("fa3", name) for name in decoded]
