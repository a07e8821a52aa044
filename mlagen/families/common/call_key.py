"""Keys of calls, by code that is compiled once from the parameters of an entry point.

A key has everything but the metadata and addresses of the tensors. It distinguishes values of
different types: a float or a bool may equal an int, and other types may define ``__eq__``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from marshal import dumps
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

# The values, a length that affects the scheduling only (0 without one), the tensors, and the
# outputs that the caller gave. A plain tuple: it costs a third of an object.
CallKey = tuple[tuple[Any, ...], int, Tensors, tuple[torch.Tensor | None, ...]]

_OPTION_TYPES = (int, bool, float, str, type(None))

# The format of marshal without references: equal bytes have equal values of equal types.
_FORMAT = 2

_KEY_FUNCTION = """
def {name}({parameters}):
    {statements}
    return ({key}) if {has_key} else None
"""
_STATEMENTS = """
given_bits, more = 0, ()
{pairs}{optional}{scales}
tensors = ({firsts}{tensors}*more,)
options = b"" if {are_default} else options_of({options})
"""
_PAIR = """
{name}_first = {name}
if {name}.__class__ is tuple and len({name}) == 2:
    given_bits += {bit}
    {name}_first, {name}_second = {name}
    more += ({name}_second,)
"""
_OPTIONAL = """
if {name} is not None:
    given_bits += {bit}
    more += ({name},)
"""
_GROUP = """
if {name}.__class__ is tuple or {name}.__class__ is list:
    given_bits += {bit} * (2 if {name}.__class__ is tuple else 3)
    more += (*{name},)
elif {name} is not None:
    given_bits += {bit}
    more += ({name},)
"""
_SCALE = """
{name}_value = {name}
if {name}.__class__ is not float:
    given_bits += {bit}
    more += ({name},)
    {name}_value = None
"""


@dataclass(frozen=True, kw_only=True)
class KeyKinds:
    """The kinds of an entry point's parameters, by their names.

    Parameters that are not named affect neither checks nor launches.
    """

    tensors: str  # that every call has
    optional: str  # the outputs, and other optional tensors
    outputs: str  # those of ``optional`` that the call writes
    options: str  # most calls leave them at their default
    pairs: str = ""  # tensors, or pairs of them
    groups: str = ""  # tensors, or tuples or lists of them
    scales: str = ""  # floats that may be tensors
    length: str = "0"  # an int that affects the scheduling only
    ints: str = ""  # calls differ in them
    constants: tuple[str, ...] = ()  # expressions of values of one type, which are no floats


@dataclass(frozen=True)
class KeyCode:
    """Python code that makes the key of a call from the parameters of an entry point."""

    function: Callable[..., Any]
    kinds: KeyKinds

    @property
    def statements(self) -> str:
        """The statements that set ``tensors`` and ``options``; they change no parameter."""
        kinds, bits = self.kinds, (4**number for number in range(100))
        return _STATEMENTS.format(
            pairs=_each(_PAIR, kinds.pairs, bits),
            firsts="".join(f"{name}_first, " for name in kinds.pairs.split()),
            tensors=_listed(kinds.tensors),
            optional=_each(_GROUP, kinds.groups, bits) + _each(_OPTIONAL, kinds.optional, bits),
            scales=_each(_SCALE, kinds.scales, bits),
            are_default=" and ".join(f"{name} is {name}_" for name in kinds.options.split())
            or "True",
            options=_listed(kinds.options),
        )

    @property
    def has_key(self) -> str:
        """The condition of a key: no length, int or option has another type."""
        names = [name for name in (*self.kinds.ints.split(), self.kinds.length) if name != "0"]
        classes = [f"{name}.__class__ is int" for name in names]
        return " and ".join(("options is not None", *classes))

    @property
    def key(self) -> str:
        """The four parts of the key."""
        kinds = self.kinds
        scales = "".join(f"{name}_value, " for name in kinds.scales.split())
        values = _listed(kinds.ints) + "".join(f"{value}, " for value in kinds.constants) + scales
        name = self.function.__name__
        return f"('{name}', given_bits, options, {values}), {kinds.length}, tensors, ({self.given})"

    @property
    def given(self) -> str:
        """The outputs that the caller gave."""
        return _listed(self.kinds.outputs)

    @property
    def names(self) -> dict[str, Any]:
        """What the code refers to, by its name there."""
        parameters = inspect.signature(self.function).parameters
        options = self.kinds.options.split()
        return {"options_of": _options_of} | {
            f"{name}_": parameters[name].default for name in options
        }


def compile_key(function: Callable[..., Any], kinds: KeyKinds) -> Callable[..., CallKey | None]:
    """Return a function of an entry point's parameters that returns the key of a call, or None."""
    code = KeyCode(function, kinds)
    source = _KEY_FUNCTION.format(
        name=function.__name__,
        parameters=", ".join(inspect.signature(function).parameters),
        statements=indented(code.statements, 1),
        key=code.key,
        has_key=code.has_key,
    )
    namespace = code.names
    exec(source, namespace)  # noqa: S102 - as dataclasses do
    key_of: Callable[..., CallKey | None] = namespace[function.__name__]
    return key_of


def indented(statements: str, levels: int) -> str:
    """Return statements for a template that has them at a level of indentation."""
    return statements.strip().replace("\n", "\n" + "    " * levels)


def factors_of(key: CallKey) -> tuple[Any, ...]:
    """Return the values of a key, with floats only known to be 1, or not."""
    return tuple((value == 1.0,) if value.__class__ is float else value for value in key[0])


def _listed(names: str) -> str:
    return "".join(f"{name}, " for name in names.split())


def _each(template: str, names: str, bits: Iterator[int]) -> str:
    return "".join(template.format(name=name, bit=next(bits)) for name in names.split())


def _options_of(*options: Any) -> bytes | None:
    if any(option.__class__ not in _OPTION_TYPES for option in options):
        return None
    return dumps(options, _FORMAT)
