"""Prewarm events: progress callbacks until the end or an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from mlagen.prewarming.report import PrewarmEvent, PrewarmUnit, RawEvent
from mlagen.spec.kernel import KernelSpec


class EventDispatcher:
    """Records events and passes them to the callback.

    The builder appends units that finish after an interrupt to ``late_units``.
    """

    def __init__(
        self,
        on_event: Callable[[PrewarmEvent], None] | None,
        total: int,
        late_units: list[PrewarmUnit],
    ) -> None:
        self._on_event = on_event
        self._total = total
        self.finished: dict[KernelSpec, PrewarmUnit] = {}
        self._late_units = late_units  # finished after an interrupt
        self.loaded = 0

    def dispatch_all(self, raw_events: Generator[RawEvent, None, None]) -> None:
        """Dispatch all events; an interrupt is raised after the late units are dispatched."""
        try:
            with closing(raw_events):  # otherwise an exception in the callback leaks threads
                for raw_event in raw_events:
                    self._dispatch(*raw_event)
        except KeyboardInterrupt:
            for unit in self._late_units:
                if unit.error is None and unit.spec not in self.finished:
                    self._dispatch("finished", unit.spec, unit)
            raise

    def _dispatch(self, kind: str, spec: KernelSpec, unit: PrewarmUnit | None) -> None:
        self.loaded += kind == "loaded"
        if unit is not None:
            self.finished[spec] = unit
        if self._on_event is not None:
            done, total = len(self.finished), self._total
            self._on_event(PrewarmEvent(kind=kind, spec=spec, unit=unit, done=done, total=total))
