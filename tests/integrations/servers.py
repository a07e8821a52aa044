"""Modules of a server for its plugin's tests: the installed ones, or stand-ins."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import make_dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, Signature
from shutil import which
from types import ModuleType
from typing import Any

import pytest

from tests.fixture_types import Patch

Import = Callable[[str], ModuleType]


def named(*members: Any, **others: Any) -> dict[str, Any]:
    """Return classes and functions by their names, and other members of a module."""
    return {member.__name__: member for member in members} | others


def stub(parameters: str = "", result: Any = NotImplementedError) -> Any:
    """Return a function with parameters of these names, which returns or raises its result."""

    def function(*_: Any, **__: Any) -> Any:
        if isinstance(result, type) and issubclass(result, Exception):
            raise result
        return result

    named_parameters = [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in parameters.split()
    ]
    vars(function)["__signature__"] = Signature(named_parameters)
    return function


def method(parameters: str, result: Any = NotImplementedError) -> Any:
    """Return :func:`stub` as a method of a class."""
    return classmethod(stub(f"cls {parameters}", result))


def fields_of(name: str, fields: str, **defaults: Any) -> Any:
    """Return a dataclass with fields of these names, and others with defaults."""
    known: list[Any] = [*fields.split()]
    known += [(field, Any, default) for field, default in defaults.items()]
    return make_dataclass(name, known)


def is_installed(server: str) -> bool:
    """Return whether the server itself can be imported, not a stand-in."""
    module = sys.modules.get(server)
    if module is not None:
        return module.__spec__ is not None
    return find_spec(server) is not None


def require_parts(model: str, parts: Iterable[str]) -> None:
    """Skip where a server lacks modules that its model needs, or nvcc, which they call."""
    missing = [part for part in parts if find_spec(part) is None]
    if which("nvcc") is None and "CUDA_HOME" not in os.environ:
        missing.append("nvcc")
    if missing:
        pytest.skip(f"{model} needs {', '.join(missing)}")


@contextmanager
def modules_of(server: str, stand_in: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Make the modules of ``stand_in`` importable for a while where the server is not installed.

    The plugin's modules are imported anew, so that they have the server's classes of this test.
    """
    ours = f"mlagen.integrations.{server}"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the server's imports
        for name in [name for name in sys.modules if name.split(".")[:3] == ours.split(".")]:
            patch.delitem(sys.modules, name)
        if is_installed(server):
            for name in stand_in:
                import_module(name)
        else:
            for name, members in stand_in.items():
                module = _module(name, patch)
                for attribute, member in members.items():
                    setattr(module, attribute, member)
        yield
        for name in [name for name in sys.modules if name.split(".")[:3] == ours.split(".")]:
            del sys.modules[name]


def _module(name: str, patch: Patch) -> ModuleType:
    """Return the module of a stand-in; its packages and itself are new where they are missing."""
    package, _, leaf = name.rpartition(".")
    if name not in sys.modules:
        patch.setitem(sys.modules, name, ModuleType(name))
        if package:
            setattr(_module(package, patch), leaf, sys.modules[name])
    return sys.modules[name]
