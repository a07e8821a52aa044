"""Converters of arguments to built-in types; public functions use the converted values only.

A converter returns a built-in int, float, bool or str, or rejects the value with a one-line
message. It accepts numpy scalars, but no arrays or tensors: reading a tensor may synchronize with
the device.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any, NoReturn, TypeVar

from mlagen.errors import ArgumentError, UnsupportedError

INT32_MAX = 2**31 - 1  # of integer kernel parameters, token counts and page ids

# Formats of caches and outputs elsewhere, of 8 bits or fewer, that no kernel reads or writes where
# they are rejected.
_UNSERVED = frozenset(
    f"torch.float{name}"
    for name in ("8_e5m2", "8_e4m3fnuz", "8_e5m2fnuz", "8_e8m0fnu", "4_e2m1fn_x2")
)

_FLOAT32 = "a number that float32 can hold"
_MAX_SHOWN = 120
_MAX_ITEMS = 12
_SCALARS = {int, float, bool, type(None), complex, range}
_MAX_SHOWN_BITS = 128
_MAX_SEVERAL = 4096

CallableT = TypeVar("CallableT", bound=Callable[..., object])


def reject(argument: str, expected: object, got: object) -> NoReturn:
    """Raise :class:`ArgumentError` that names argument, rule and value.

    A str is inserted unquoted, as a description of the value.
    """
    value = got if isinstance(got, str) else shown(got)
    raise ArgumentError(f"{argument}: expected {expected}, got {value}")


def require(condition: bool, argument: str, expected: object, got: object) -> None:
    """Raise :class:`ArgumentError` naming the argument, the rule and the value."""
    if not condition:
        reject(argument, expected, got)


def reject_dtype(argument: str, expected: object, dtype: object) -> NoReturn:
    """Raise as :func:`reject` does, or :class:`UnsupportedError` for a format without a kernel."""
    if isinstance(dtype, _of("torch", "dtype")) and str(dtype) in _UNSERVED:
        raise UnsupportedError(f"{argument}: not implemented, expected {expected}, got {dtype}")
    reject(argument, expected, shown(dtype))


def require_whole_number(
    value: object,
    argument: str,
    *,
    min_value: int | None = 0,
    max_value: int | None = INT32_MAX,
) -> int:
    """Return an int within both bounds, from any integer type except bool; None is no bound."""
    number = value if type(value) is int else _index(value)
    if number is None or (min_value is not None and number < min_value):
        rule = "an int" if min_value is None else f"an int, {min_value} or more"
        reject(argument, rule, shown(value))
    if max_value is not None and number > max_value:
        reject(argument, f"{max_value} or less", shown(value))
    return number


def require_number(value: object, argument: str, rule: str = "a float") -> float:
    """Return a float, possibly infinite or NaN; accepts ints, but no bools."""
    try:
        number = value if type(value) is float else _real(value)
    except OverflowError:
        reject(argument, _FLOAT32, shown(value))
    if number is None:
        reject(argument, rule, shown(value))
    return number


def require_float32(value: object, argument: str, rule: str = "a float") -> float:
    """Return a float in the range of float32, the type of kernel parameters."""
    number = require_number(value, argument, rule)
    try:
        struct.pack("<f", number)
    except OverflowError:
        reject(argument, _FLOAT32, f"{number:.3g}")
    return number


def require_flag(value: object, argument: str) -> bool:
    """Return a bool; accepts the ints 0 and 1."""
    if value is True or value is False:
        return value
    number = _index(value)
    if number in {0, 1}:
        return number == 1
    if not isinstance(value, _of("numpy", "bool_")):
        reject(argument, "a bool", shown(value))
    return bool(value)


def require_choice(value: object, argument: str, names: Collection[str]) -> str:
    """Return one of ``names``."""
    text = str.__str__(value) if isinstance(value, str) else None
    if text is None or text not in names:
        reject(argument, f"one of {', '.join(names)}", shown(value))
    return text


def is_scalar(value: object) -> bool:
    """Whether a value is a str, or a number or flag of Python or numpy, not an array."""
    return isinstance(value, (int, float, str, _of("numpy", "generic")))


def require_callable(value: CallableT, argument: str) -> CallableT:
    """Return a callable."""
    if not callable(value):
        reject(argument, "a callable", shown(value))
    return value


def require_text(value: object, argument: str) -> str:
    """Return a str."""
    if not isinstance(value, str):
        reject(argument, "a str", shown(value))
    return str.__str__(value)


def as_str_list(values: object, argument: str) -> list[str]:
    """Return a list of strs; one str is split at commas."""
    if isinstance(values, str):
        return str.__str__(values).split(",")
    return [require_text(value, argument) for value in as_list(values, argument)]


def as_list(values: object, argument: str) -> list[Any]:
    """Return the values of an iterable other than a str, or a list of the one value."""
    if isinstance(values, str) or not isinstance(values, Iterable) or _is_array(values):
        return [values]
    found = list(islice(values, _MAX_SEVERAL + 1))
    if len(found) > _MAX_SEVERAL:
        reject(argument, f"{_MAX_SEVERAL} values or fewer", "more")
    return found


def shown(value: object) -> str:
    """Return the representation of any value for a message, on one short line.

    It does not read a tensor, which would synchronize with the device.
    """
    try:
        line = "".join(letter if letter.isprintable() else " " for letter in _text(value))
    except Exception:  # noqa: BLE001 - a __repr__ may raise anything
        line = "a value that cannot be shown"
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]} ..."


def _text(value: Any, depth: int = 0) -> str:
    """Return the value of a scalar, the items of a list or tuple, the type name of another."""
    kind = type(value)
    if kind in {list, tuple}:
        items = [_text(item, depth + 1) for item in value[:_MAX_ITEMS]] if depth < 3 else ["..."]
        text = ", ".join(items + ["..."] * (len(value) > _MAX_ITEMS))
        return f"[{text}]" if kind is list else f"({text}{',' * (len(value) == 1)})"
    if kind is int and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an int of {value.bit_length()} bits"
    if kind in {str, bytes}:
        return repr(value[:_MAX_SHOWN])
    if isinstance(value, _of("torch", "Tensor")):
        return "a tensor"
    is_known = kind.__module__.partition(".")[0] in {"numpy", "torch", "pathlib", "fractions"}
    is_scalar = kind in _SCALARS or (is_known and not _is_array(value))
    form = str if isinstance(value, _of("torch", "device")) else repr
    return form(value) if is_scalar else kind.__qualname__


def _of(module: str, name: str) -> Any:
    """Return a class of a module, or () if the module is not imported."""
    return getattr(sys.modules.get(module), name, ())


def _is_array(value: object) -> bool:
    """Whether a value may have several elements, or data on a device; numpy scalars do not."""
    kind = type(value)
    has_array_interface = hasattr(kind, "__array__") or hasattr(kind, "__dlpack__")
    return has_array_interface and not isinstance(value, _of("numpy", "generic"))


def _index(value: Any) -> int | None:
    """Return an integer as an int; None for another value."""
    if isinstance(value, (bool, _of("numpy", "bool_"))) or _is_array(value):
        return None
    try:
        return int.__index__(operator.index(value))
    except Exception:  # noqa: BLE001 - a class may raise anything
        return None


def _real(value: Any) -> float | None:
    """Return a real number as a float; None for another value.

    Raises OverflowError if it exceeds the range of float.
    """
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, _of("numpy", "floating")):
        number = float(value)
        if math.isinf(number) and number != value:
            raise OverflowError
        return number
    whole = _index(value)
    return None if whole is None else float(whole)
