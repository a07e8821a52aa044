"""Schemas of torch ops, derived from the signatures of their entry points."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mlagen.families.common.arguments import reject

# Parameters that no op has: it allocates its scratch, its out variant takes the outputs, and an
# object of any class has no type there.
_OMITTED = {
    "workspace_buffer",
    "semaphores",
    "out",
    "output",
    "lse",
    "request_order_plan",
    "workspace",
}

_SINGLE = {"float": "float", "bool": "bool", "int": "SymInt", "SupportsIndex": "SymInt"}


class Argument(NamedTuple):
    """One parameter of an entry point and its type in the op's schema."""

    name: str
    type: str  # "scale" is a float and an optional tensor, "pair" one tensor or two
    default: object  # inspect.Parameter.empty where there is none


def arguments_of(function: Callable[..., Any]) -> tuple[Argument, ...]:
    """Return the op's arguments for the parameters of a function, in order."""
    return tuple(
        Argument(name, _type_of(str(parameter.annotation)), parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in _OMITTED and name != "self"
    )


def schema_of(arguments: Sequence[Argument]) -> str:
    """Return the list of arguments of a schema; the second tensors of pairs are the last."""
    entries = [entry for argument in arguments for entry in _schema_entries(argument)]
    return ", ".join((*entries, *(f"Tensor? {name}=None" for name in _seconds(arguments))))


def flatten_args(arguments: Sequence[Argument], given: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of an op for those of its entry point; a compiler traces it."""
    values: list[Any] = []
    seconds: list[Any] = []
    for name, kind, _ in arguments:
        value = given[name]
        if kind == "pair":
            first, second = _parts_of_pair(name, value)
            values.append(first)
            seconds.append(second)
        elif kind == "scale":
            is_tensor = isinstance(value, torch.Tensor)
            values.append(1.0 if is_tensor else value)
            values.append(value if is_tensor else None)
        elif kind.startswith("Tensor[]") and value is not None:
            values.append(list(value) if isinstance(value, (tuple, list)) else [value])
        else:
            values.append(value)
    return values + seconds


def bind_args(
    arguments: Sequence[Argument], values: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of an entry point for those of its op."""
    names = [name for argument in arguments for name in _names(argument)] + _seconds(arguments)
    flat_values = {**dict(zip(names, values, strict=False)), **named}
    given: dict[str, Any] = {}
    for name, kind, default in arguments:
        value = flat_values.get(name, default)
        if kind == "scale" and flat_values.get(f"{name}_tensor") is not None:
            value = flat_values[f"{name}_tensor"]
        if kind.startswith("Tensor[]") and value is not None:
            value = value[0] if len(value) == 1 else tuple(value)
        if kind == "pair" and flat_values.get(f"{name}_second") is not None:
            value = (value, flat_values[f"{name}_second"])
        given[name] = value
    return given


def _parts_of_pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)):
        return value, None
    if len(value) != 2:
        reject(name, "a torch.Tensor or a pair of them", f"{len(value)} parts")
    return value[0], value[1]


def _seconds(arguments: Sequence[Argument]) -> list[str]:
    return [f"{argument.name}_second" for argument in arguments if argument.type == "pair"]


def _names(argument: Argument) -> tuple[str, ...]:
    name = argument.name
    return (name, f"{name}_tensor") if argument.type == "scale" else (name,)


def _schema_entries(argument: Argument) -> tuple[str, ...]:
    name, kind, default = argument
    text = ""
    if default is not inspect.Parameter.empty:
        text = f"={_literal(default)}"
    if kind != "scale":
        return (f"{'Tensor' if kind == 'pair' else kind} {name}{text}",)
    # A given tensor overrides the number.
    return (f"float {name}{text}", f"Tensor? {name}_tensor{'=None' if text else ''}")


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _type_of(annotation: str) -> str:
    parts = [part.strip() for part in annotation.split("|")]
    optional = "?" if "None" in parts else ""
    if "list[" in annotation:
        return f"Tensor[]{optional}"
    if "tuple[" in annotation:
        return "pair"
    if "torch.dtype" in parts:
        return f"ScalarType{optional}"
    if "torch.Tensor" in parts:
        return "scale" if "float" in parts else f"Tensor{optional}"
    for part, kind in _SINGLE.items():
        if part in parts:
            return kind + optional
    if "str" in parts:
        return f"str{optional}"
    raise TypeError(f"annotation: expected one that a schema has a type for, got {annotation}")
