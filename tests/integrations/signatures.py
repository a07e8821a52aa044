"""Signatures of classes that must agree: stand-ins with a server, overrides with their bases."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def parameters(function: Any) -> tuple[list[str], bool]:
    """Return the names of a function's parameters, and whether it takes any other keyword."""
    signature = inspect.signature(inspect.unwrap(function)).parameters.values()
    names = [
        each.name for each in signature if each.kind not in {each.VAR_KEYWORD, each.VAR_POSITIONAL}
    ]
    return names, any(each.kind is each.VAR_KEYWORD for each in signature)


def disagreement(ours: Any, theirs: Any) -> str | None:
    """Return how the parameters of two functions differ; a function may stop at ``**keywords``."""
    (own, is_open), (other, other_is_open) = parameters(ours), parameters(theirs)
    if is_open:
        other = other[: len(own)]
    if other_is_open:
        own = own[: len(other)]
    return None if own == other else f"expected {other}, got {own}"


def own_members(cls: type, package: str) -> Iterator[tuple[str, Any]]:
    """Yield what the classes of ``package`` among ``cls`` and its bases define."""
    for each in cls.__mro__:
        if each.__module__.startswith(package):
            for name, member in vars(each).items():
                if not name.startswith("__") or name == "__init__":
                    yield name, _called(member, each)


def _called(member: Any, cls: Any) -> Any:
    """Return a method of a class as it is called: static or not, it may have the same callers."""
    is_bound = isinstance(member, (classmethod, staticmethod))
    return inspect.unwrap(member.__get__(None, cls) if is_bound else member)


def disagreements(ours: Any, theirs: Any, package: str) -> Iterator[str]:
    """Yield where a class of ``package``, or a function, has what ``theirs`` has not."""
    if not isinstance(ours, type):
        if difference := disagreement(ours, theirs):
            yield difference
    elif issubclass(ours, Enum):
        known = {member.name: member.value for member in theirs}
        yield from (each.name for each in ours if known.get(each.name) != each.value)
    elif is_dataclass(ours):
        known_fields = [each.name for each in fields(theirs)]
        yield from (each.name for each in fields(ours) if each.name not in known_fields)
    else:
        yield from _of_members(ours, theirs, package)


def _of_members(ours: type, theirs: Any, package: str) -> Iterator[str]:
    for name, member in own_members(ours, package):
        if not hasattr(theirs, name):
            yield f"{name}: missing"
        elif inspect.isroutine(member):
            other = _called(inspect.getattr_static(theirs, name), theirs)
            if difference := disagreement(member, other):
                yield f"{name}: {difference}"
