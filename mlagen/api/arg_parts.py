"""The tensors, floats and other values of a call's inputs, each taken in one step.

Which input is of which kind depends on the classes of all alone, of which serving has few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_WORDS = (int, bool, str, type(None))


@dataclass(frozen=True, eq=False)
class ArgParts:
    """What takes the parts of inputs; one object for each tuple of their classes."""

    tensors_of: Callable[[Any], tuple[torch.Tensor, ...]]
    floats_of: Callable[[Any], tuple[float, ...]]
    words_of: Callable[[Any], tuple[Any, ...]]


class ArgPartsByType(dict[tuple[type, ...], ArgParts]):
    """Parts of inputs by their classes; the last, the names of the others, is in none."""

    def __init__(self, excluded: int) -> None:
        """Leave the int in the place ``excluded`` out of the words."""
        super().__init__()
        self._excluded = excluded

    def find(self, args: tuple[Any, ...]) -> ArgParts | None:
        """Return the parts of inputs; None if there is a value of an unusual class.

        Such a value may have an ``__eq__`` or ``__hash__`` of its own.
        """
        classes = tuple(map(type, args))
        parts = self.get(classes)
        return parts if parts is not None else self._add(classes)

    def _add(self, classes: tuple[type, ...]) -> ArgParts | None:
        places: dict[str, list[int]] = {"tensors": [], "floats": [], "words": []}
        for place, kind in enumerate(classes[:-1]):
            if kind in _TENSORS:
                places["tensors"].append(place)
            elif kind is float:
                places["floats"].append(place)
            elif kind not in _WORDS:
                return None
            elif place != self._excluded:
                places["words"].append(place)
        if min(map(len, places.values())) < 2 or classes[self._excluded] is not int:
            return None  # an itemgetter of one place gives no tuple
        getters = (itemgetter(*places[part]) for part in ("tensors", "floats", "words"))
        parts = self[classes] = ArgParts(*getters)
        return parts
