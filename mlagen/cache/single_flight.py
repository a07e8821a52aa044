"""Single flight: one thread per key does the work; concurrent callers wait for its result."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SingleFlight(Generic[Result]):
    """Active calls, by key.

    There is no mutex that a fork could copy locked: ``dict.setdefault`` elects the worker. The
    process id is part of the key, since a forked child has none of its parent's threads and would
    wait for their results for ever.
    """

    def __init__(self) -> None:
        self._flights: dict[tuple[int, str], tuple[Future[Result], int]] = {}

    def run(self, key: str, work: Callable[[], Result]) -> Result:
        """Return or raise the result of ``work``, which runs once for concurrent calls of a key.

        Raises
        ------
        RuntimeError
            If ``work`` requests its own key, which would deadlock.
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
