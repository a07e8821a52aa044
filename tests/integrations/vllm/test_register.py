"""``register`` with vLLM's registry, and with versions that lack a part of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fixture_types import Log, Patch
from tests.integrations.servers import Import

REGISTRY = "vllm.v1.attention.backends.registry"
MODELS = "vllm.model_executor.models.registry"
NAMES = {"MLAGEN_MLA", "MLAGEN_MLA_SPARSE", "MLAGEN_GQA"}


def registry_of(register: Callable[..., Any] | None) -> Any:
    """Return an enum of backends with a method ``register``, or without one."""

    class Registry(Enum):
        OTHER = "other"

        @classmethod
        def add(cls, name: str, value: object) -> None:
            member = object.__new__(cls)
            member._name_, member._value_ = name, value
            setattr(cls, name, member)
            cls._member_map_[name] = member
            cls._member_names_.append(name)

    if register is not None:
        type.__setattr__(Registry, "register", classmethod(register))
    return Registry


def fails_late(cls: Any, name: str, value: str) -> None:
    """Add the first names, and fail at the last."""
    if name == "MLAGEN_GQA":
        raise ValueError(f"Invalid or reserved\nbackend name: {name}")
    cls.add(name, value)


def takes_a_kind(cls: Any, name: str, value: str, *, kind: str) -> None:
    """Need one more argument."""
    del kind
    cls.add(name, value)


def takes_a_class(cls: Any, value: type) -> None:
    """Take classes instead of names."""
    cls.add(value.__name__, value)


def keeps_nothing(_cls: Any, _name: str, _value: str) -> Callable[[Any], Any]:
    """Return a decorator, as of a version whose names are given to classes."""
    return lambda decorated: decorated


OTHER_VERSIONS: dict[str, tuple[Callable[[], Any] | None, str]] = {
    "no module": (None, "ModuleNotFoundError: "),
    "no registry": (lambda: None, "ImportError: cannot import name 'AttentionBackendEnum'"),
    "no method": (lambda: registry_of(None), "AttributeError: "),
    "another argument": (lambda: registry_of(takes_a_kind), "TypeError: missing a required"),
    "another signature": (lambda: registry_of(takes_a_class), "TypeError: too many"),
    "a failure at the last name": (
        lambda: registry_of(fails_late),
        "ValueError: Invalid or reserved backend name: MLAGEN_GQA",
    ),
    "a registry that keeps nothing": (
        lambda: registry_of(keeps_nothing),
        "LookupError: a registry without MLAGEN_MLA, MLAGEN_MLA_SPARSE, MLAGEN_GQA",
    ),
    "no enum": (dict, "AttributeError: "),
}


@pytest.mark.parametrize("case", OTHER_VERSIONS)
def test_another_vllm_registers_nothing(
    vllm: Import, case: str, monkeypatch: Patch, caplog: Log
) -> None:
    """Whatever another version lacks, one warning names what was expected, and vLLM starts."""
    make, reason = OTHER_VERSIONS[case]
    module = None if make is None else ModuleType(REGISTRY)
    registry = make() if make else None
    if module is not None and registry is not None:
        vars(module)["AttentionBackendEnum"] = registry
    monkeypatch.setitem(sys.modules, REGISTRY, module)
    plugin = vllm("mlagen.integrations.vllm")

    with caplog.at_level(logging.WARNING, logger="mlagen"):
        plugin.register()

    (record,) = caplog.records
    message = record.getMessage()
    assert f": expected AttentionBackendEnum.register(name, value) in {REGISTRY} and" in message
    assert reason in message
    if isinstance(registry, type) and issubclass(registry, Enum):
        assert [each.name for each in registry] == ["OTHER"]
        assert not any(hasattr(registry, name) for name in NAMES)


def test_an_import_error_inside_vllm_is_a_warning(
    vllm: Import, monkeypatch: Patch, caplog: Log
) -> None:
    """A vLLM whose own import fails, of a missing library for example, is left to itself."""

    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == REGISTRY:
                raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, REGISTRY)
    package = vllm(REGISTRY.rpartition(".")[0])
    monkeypatch.setattr(package, "__path__", [], raising=False)  # of a stand-in
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    plugin = vllm("mlagen.integrations.vllm")

    plugin.register()

    assert "got OSError: libcudart.so.13: cannot open" in caplog.text
    assert len(caplog.records) == 1


def test_a_vllm_with_another_registry_of_models_registers_nothing(
    vllm: Import, monkeypatch: Patch, caplog: Log
) -> None:
    """The names of backends are withdrawn too."""
    registry = registry_of(lambda cls, name, value: cls.add(name, value))
    module = ModuleType(REGISTRY)
    vars(module)["AttentionBackendEnum"] = registry
    monkeypatch.setitem(sys.modules, REGISTRY, module)
    models = vllm(MODELS)
    monkeypatch.setattr(models, "ModelRegistry", SimpleNamespace())

    vllm("mlagen.integrations.vllm").register()

    (message,) = caplog.messages
    assert f"ModelRegistry.models in {MODELS}, got AttributeError: " in message
    assert [each.name for each in registry] == ["OTHER"]
