"""Plain values of arguments: every public function uses what a converter returned, and no other.

A converter takes what a caller passed and returns Python's own int, float, bool or str, or rejects
it with one line. Scalars of numpy are accepted as the values that they are; arrays and tensors are
not, for reading a tensor may wait for a device.
"""

from __future__ import annotations

import math
import operator
import reprlib
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any, NoReturn, TypeVar

from mlagen.errors import ArgumentError

INT32_MAX = 2**31 - 1  # the integers of a kernel's parameters, and of token counts and page ids

_FLOAT32 = "a number that float32 can hold"
_MAX_SHOWN = 120
_MAX_SHOWN_BITS = 128
_MAX_SEVERAL = 4096

CallableT = TypeVar("CallableT", bound=Callable[..., object])


def reject(argument: str, expected: object, got: object) -> NoReturn:
    """Raise :class:`ArgumentError` that names argument, rule and value.

    A str is shown as it is, for it is text that says what a value is.
    """
    value = got if isinstance(got, str) else shown(got)
    raise ArgumentError(f"{argument}: expected {expected}, got {value}")


def require_whole_number(
    value: object, argument: str, *, least: int | None = 0, most: int | None = INT32_MAX
) -> int:
    """Return an int from ``least`` to ``most``, of any integer type but bool; None is no bound."""
    number = value if type(value) is int else _index(value)
    if number is None or (least is not None and number < least):
        reject(argument, "an int" if least is None else f"an int, {least} or more", shown(value))
    if most is not None and number > most:
        reject(argument, f"{most} or less", shown(value))
    return number


def require_number(value: object, argument: str, rule: str = "a float") -> float:
    """Return a float, which may be infinite or NaN; ints are numbers, bools are not."""
    try:
        number = value if type(value) is float else _real(value)
    except OverflowError:
        reject(argument, _FLOAT32, shown(value))
    if number is None:
        reject(argument, rule, shown(value))
    return number


def require_float32(value: object, argument: str, rule: str = "a float") -> float:
    """Return a float that the 4 bytes that a kernel is given can hold."""
    number = require_number(value, argument, rule)
    try:
        struct.pack("<f", number)
    except OverflowError:
        reject(argument, _FLOAT32, f"{number:.3g}")
    return number


def require_flag(value: object, argument: str) -> bool:
    """Return a bool; the ints 0 and 1 stand for one."""
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


def require_callable(value: CallableT, argument: str) -> CallableT:
    """Return what can be called."""
    if not callable(value):
        reject(argument, "a callable", shown(value))
    return value


def require_text(value: object, argument: str) -> str:
    """Return a str."""
    if not isinstance(value, str):
        reject(argument, "a str", shown(value))
    return str.__str__(value)


def texts(values: object, argument: str) -> list[str]:
    """Return several strs; one str names them with commas."""
    if isinstance(values, str):
        return str.__str__(values).split(",")
    return [require_text(value, argument) for value in several(values, argument)]


def several(values: object, argument: str) -> list[Any]:
    """Return the values of an iterable that is no str, or the one value."""
    if isinstance(values, str) or not isinstance(values, Iterable) or _is_array(values):
        return [values]
    found = list(islice(values, _MAX_SEVERAL + 1))
    if len(found) > _MAX_SEVERAL:
        reject(argument, f"{_MAX_SEVERAL} values or fewer", "more")
    return found


def shown(value: object) -> str:
    """Return how a message shows a value: on one short line, whatever it is.

    A tensor is not read, which would wait for its device.
    """
    try:
        line = _line.repr(value)
        line = "".join(letter if letter.isprintable() else " " for letter in line)
    except Exception:  # noqa: BLE001 - a class may raise anything where it says what it is
        line = "a value that cannot be shown"
    return line if len(line) <= _MAX_SHOWN else f"{line[:_MAX_SHOWN]} ..."


class _Line(reprlib.Repr):
    """Representations that read no tensor and no more of a value than they show."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = 12
        self.maxstring = self.maxother = _MAX_SHOWN

    def repr1(self, value: Any, level: int) -> str:
        """Return a list or a tuple by its items, and everything else as a whole."""
        if type(value) in {list, tuple, str, int}:
            return super().repr1(value, level)
        return self.repr_instance(value, level)

    def repr_int(self, value: int, _level: int) -> str:
        """Return the digits of an int, unless they are many."""
        bits = value.bit_length()
        return repr(value) if bits <= _MAX_SHOWN_BITS else f"an int of {bits} bits"

    def repr_instance(self, value: Any, level: int) -> str:
        """Return a scalar by its value, and what may hold anything by its class."""
        kind = type(value)
        if isinstance(value, _of("torch", "Tensor")):
            return "a tensor"
        if isinstance(value, _of("torch", "device")):
            return str(value)
        if kind is bytes:
            return repr(value[: self.maxstring])
        is_scalar = kind in {float, bool, type(None), complex, range}
        is_known = kind.__module__.partition(".")[0] in {"numpy", "torch", "pathlib", "fractions"}
        if is_scalar or (is_known and not _is_array(value)):
            return super().repr_instance(value, level)
        return kind.__qualname__


_line = _Line()


def _of(module: str, name: str) -> Any:
    """Return a class of a module, or no class if the module is not imported."""
    return getattr(sys.modules.get(module), name, ())


def _is_array(value: object) -> bool:
    """Whether it may have several elements, or some on a device; scalars of numpy are none."""
    kind = type(value)
    guard = hasattr(kind, "__array__") or hasattr(kind, "__dlpack__")
    return guard and not isinstance(value, _of("numpy", "generic"))


def _index(value: Any) -> int | None:
    """Return the int that a value is, if it is one."""
    if isinstance(value, (bool, _of("numpy", "bool_"))) or _is_array(value):
        return None
    try:
        return int.__index__(operator.index(value))
    except Exception:  # noqa: BLE001 - a class may raise anything
        return None


def _real(value: Any) -> float | None:
    """Return the float that a value is, if it is one.

    Raises
    ------
    OverflowError
        If it is a number beyond any float.
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
