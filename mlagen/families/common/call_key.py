"""Keys of calls, by functions that are compiled once from the parameters of an entry point.

A key has everything but the metadata and addresses of the tensors. It distinguishes values of
different types: a float or a bool may equal an int, and other types may define ``__eq__``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from marshal import dumps
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]

# The values, a length that affects the scheduling only (0 without one), the tensors, and the
# outputs that the caller gave. A plain tuple: it costs a third of an object.
CallKey = tuple[tuple[Any, ...], int, Tensors, tuple[torch.Tensor | None, ...]]

_WORD_TYPES = (int, bool, float, str, type(None))

# The format of marshal without references: equal bytes have equal values of equal types.
_FORMAT = 2

_FUNCTION = """
def key_of({parameters}):
    form, tensors = 0, ({tensors})
{optional}{scales}
    words = b"" if {is_usual} else words_of({words})
    if words is None or not ({has_ints}):
        return None
    return (name, form, words, {values}), {length}, tensors, ({outputs})
"""
_OPTIONAL = """
    if {name} is not None:
        form += {bit}
        tensors += ({name},)
"""
_GROUP = """
    if {name}.__class__ is tuple or {name}.__class__ is list:
        form += {bit} * (2 if {name}.__class__ is tuple else 3)
        tensors += (*{name},)
    elif {name} is not None:
        form += {bit}
        tensors += ({name},)
"""
_SCALE = """
    if {name}.__class__ is not float:
        form += {bit}
        tensors += ({name},)
        {name} = None
"""


def compile_key(
    function: Callable[..., Any],
    *,
    tensors: str,
    optional: str,
    outputs: str,
    words: str,
    groups: str = "",
    scales: str = "",
    length: str = "0",
    ints: str = "",
    constants: tuple[str, ...] = (),
) -> Callable[..., CallKey | None]:
    """Return a function of an entry point's parameters that returns the key of a call.

    None if a length, an int or a word has another type. Parameters that are not named affect
    neither checks nor launches.

    Parameters
    ----------
    function
        The entry point.
    tensors : str
        The names of the tensors that every call has.
    optional : str
        The names of the outputs, and of other optional tensors.
    outputs : str
        Those of ``optional`` that the call writes.
    words : str
        The names of parameters that most calls leave at their default.
    groups : str
        The names of tensors, or tuples or lists of them.
    scales : str
        The names of floats that may be tensors.
    length : str
        The name of an int that affects the scheduling only.
    ints : str
        The names of ints that calls differ in.
    constants : tuple[str, ...]
        Expressions of values of one type, which are no floats.
    """
    parameters = inspect.signature(function).parameters
    defaults = {f"{name}_": parameters[name].default for name in words.split()}
    classes = [f"{name}.__class__ is int" for name in (*ints.split(), length) if name != "0"]
    bits = iter(range(100))
    source = _FUNCTION.format(
        parameters=", ".join(parameters),
        tensors=_listed(tensors),
        optional="".join(
            template.format(name=name, bit=4 ** next(bits))
            for template, names in ((_GROUP, groups), (_OPTIONAL, optional))
            for name in names.split()
        ),
        scales="".join(_SCALE.format(name=name, bit=4 ** next(bits)) for name in scales.split()),
        is_usual=" and ".join(f"{name} is {name}_" for name in words.split()) or "True",
        words=_listed(words),
        has_ints=" and ".join(classes) or "True",
        values=_listed(ints) + "".join(f"{value}, " for value in constants) + _listed(scales),
        length=length,
        outputs=_listed(outputs),
    )
    namespace: dict[str, Any] = {"words_of": _words_of, "name": function.__name__, **defaults}
    exec(source, namespace)  # noqa: S102 - as dataclasses do
    key_of: Callable[..., CallKey | None] = namespace["key_of"]
    return key_of


def factors_of(key: CallKey) -> tuple[Any, ...]:
    """Return the values of a key, with floats only known to be 1, or not."""
    return tuple((value == 1.0,) if value.__class__ is float else value for value in key[0])


def _listed(names: str) -> str:
    return "".join(f"{name}, " for name in names.split())


def _words_of(*words: Any) -> bytes | None:
    if any(word.__class__ not in _WORD_TYPES for word in words):
        return None
    return dumps(words, _FORMAT)
