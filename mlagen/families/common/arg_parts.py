"""Splits call arguments into tensors, floats and values of the fast-path key, one getter for each.

The split depends on the types of all arguments alone, and serving uses few combinations of types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_KEY_TYPES = (int, bool, str, type(None))


@dataclass(frozen=True, eq=False)
class ArgParts:
    """Getters of the argument parts; one object for each tuple of argument types."""

    tensors_of: Callable[[Any], tuple[torch.Tensor, ...]]
    floats_of: Callable[[Any], tuple[float, ...]]
    key_values_of: Callable[[Any], tuple[Any, ...]]


class ArgPartsByType(dict[tuple[type, ...], ArgParts]):
    """Argument parts by argument types; the last argument, the names, is in no part."""

    def __init__(self, excluded: int) -> None:
        """Omit the int at index ``excluded`` from the key values."""
        super().__init__()
        self._excluded = excluded

    def find(self, args: tuple[Any, ...]) -> ArgParts | None:
        """Return the parts of ``args``; None if one has another type.

        Such a value may define ``__eq__`` or ``__hash__`` itself.
        """
        types = tuple(map(type, args))
        parts = self.get(types)
        return parts if parts is not None else self._add(types)

    def _add(self, types: tuple[type, ...]) -> ArgParts | None:
        indices: dict[str, list[int]] = {"tensors": [], "floats": [], "key_values": []}
        for index, type_ in enumerate(types[:-1]):
            if type_ in _TENSORS:
                indices["tensors"].append(index)
            elif type_ is float:
                indices["floats"].append(index)
            elif type_ not in _KEY_TYPES:
                return None
            elif index != self._excluded:
                indices["key_values"].append(index)
        if min(map(len, indices.values())) < 2 or types[self._excluded] is not int:
            return None  # an itemgetter of one index returns no tuple
        getters = (itemgetter(*indices[part]) for part in ("tensors", "floats", "key_values"))
        parts = self[types] = ArgParts(*getters)
        return parts
