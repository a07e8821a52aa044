"""Entry points: their parameters, split into tensors, floats and values of the call key.

The split depends on the types of all arguments alone, and serving uses few combinations of types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, TypeVar

import torch

ArgsT = TypeVar("ArgsT")
Getter = Callable[[tuple[Any, ...]], tuple[Any, ...]]

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SEQUENCES = (tuple, list)  # of tensors
_KEY_TYPES = (int, bool, str, type(None), torch.dtype, torch.Size)

# Parameters whose value only affects the scheduling.
_LENGTHS = ("max_seq_len", "max_kv_len")


@dataclass(frozen=True, eq=False)
class ArgParts:
    """Getters of the parts of a call's arguments; one object for each tuple of types."""

    tensors_of: Getter
    floats_of: Getter
    values_of: Getter
    length: int | None  # the index of a length, which the key has rounded up


@dataclass(eq=False)
class EntryPoint(Generic[ArgsT]):
    """The parameters of an entry point, and the arguments of its family that they become.

    Parameters
    ----------
    names : tuple[str, ...]
        The parameter names, in order.
    args_of : Callable
        Returns the family's arguments and ``enable_pdl`` of a call, given by parameter name. They
        depend on metadata and addresses of the tensors and on the other values, not on contents.
    unkeyed : tuple[str, ...]
        Parameters that affect neither a check nor a launch.
    """

    names: tuple[str, ...]
    args_of: Callable[[dict[str, Any]], tuple[ArgsT, bool]]
    unkeyed: tuple[str, ...] = ()
    outputs: list[int] = field(init=False)  # indices of the output and, if any, its LSE
    parts: PartsByType = field(init=False)

    def __post_init__(self) -> None:
        """Find the outputs among the parameters."""
        names = self.names
        self.outputs = [names.index(name) for name in ("out", "output", "lse") if name in names]
        self.parts = PartsByType(self.names, self.unkeyed)


class PartsByType(dict[tuple[type, ...], ArgParts | None]):
    """Argument parts by argument types.

    None for other types: such a value may define ``__eq__`` or ``__hash__`` itself.
    """

    def __init__(self, names: tuple[str, ...], unkeyed: tuple[str, ...]) -> None:
        super().__init__()
        self._names = names
        self._unkeyed = unkeyed

    def __missing__(self, types: tuple[type, ...]) -> ArgParts | None:
        of_name = dict(zip(self._names, types, strict=True))
        length = None
        tensors, sequences, floats, values = [], [], [], []
        for index, (name, type_) in enumerate(of_name.items()):
            if name in self._unkeyed:
                continue
            if type_ in _TENSORS:
                tensors.append(index)
            elif type_ in _SEQUENCES:
                sequences.append(index)
            elif type_ is float:
                floats.append(index)
            elif type_ not in _KEY_TYPES:
                return None
            elif name in _LENGTHS and type_ is int and not _needs_length(of_name):
                length = index
            else:
                values.append(index)
        plain = getter(tensors)
        parts = self[types] = ArgParts(
            _with_sequences(plain, sequences) if sequences else plain,
            getter(floats),
            getter(values),
            length,
        )
        return parts


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameter names of an entry point."""
    return tuple(inspect.signature(function).parameters)


def _needs_length(of_name: dict[str, type]) -> bool:
    """Whether a check depends on the length itself: a bias must cover it."""
    return of_name.get("bias", type(None)) is not type(None)


def getter(indices: Sequence[int]) -> Getter:
    """Return a getter of the arguments at the indices, as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    only = indices[0] if indices else 0  # an itemgetter of one index returns no tuple
    return itemgetter(slice(only, only + len(indices)))


def _with_sequences(plain: Getter, indices: list[int]) -> Getter:
    """Return a getter of tensors and, after them, of the elements of tuples and lists."""
    if len(indices) == 1:
        (only,) = indices
        return lambda args: (*plain(args), *args[only])
    return lambda args: (*plain(args), *(tensor for index in indices for tensor in args[index]))
