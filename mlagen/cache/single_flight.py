"""One worker per key among the threads of a process; the others wait for what it brings."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SingleFlight(Generic[Result]):
    """Calls that are under way, by key.

    It holds no mutex that a fork could leave locked: ``dict.setdefault`` decides who works. The
    process id is part of the key, since a forked child has none of its parent's threads and would
    wait for ever for what they bring.
    """

    def __init__(self) -> None:
        self._flights: dict[tuple[int, str], tuple[Future[Result], int]] = {}

    def run(self, key: str, work: Callable[[], Result]) -> Result:
        """Return or raise what ``work`` does; of simultaneous calls for a key, one works.

        Raises
        ------
        RuntimeError
            If ``work`` asks for its own key: it would wait for itself.
        """
        mine: Future[Result] = Future()
        place = (os.getpid(), key)
        flight, thread = self._flights.setdefault(place, (mine, threading.get_ident()))
        if flight is not mine:
            if thread == threading.get_ident():
                raise RuntimeError(f"kernel {key}: expected no request while building it, got one")
            return flight.result()
        try:
            result = work()
        except BaseException as error:
            del self._flights[place]
            mine.set_exception(error)
            raise
        del self._flights[place]
        mine.set_result(result)
        return result
