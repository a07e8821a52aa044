"""Progress of a prewarm, up to the end or to an interrupt."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing

from mlagen.prewarming.report import Happening, PrewarmEvent, PrewarmUnit
from mlagen.spec.kernel import KernelSpec


class Events:
    """What has happened so far, passed on to the callback as it happens.

    ``late`` is filled by those who build, with what is finished after an interrupt.
    """

    def __init__(
        self,
        on_event: Callable[[PrewarmEvent], None] | None,
        total: int,
        late: list[PrewarmUnit],
    ) -> None:
        self._on_event = on_event
        self._total = total
        self.finished: dict[KernelSpec, PrewarmUnit] = {}
        self._late = late  # finished after an interrupt
        self.loaded = 0

    def follow(self, happenings: Generator[Happening, None, None]) -> None:
        """Run to the end; an interrupt is raised once all that is kept has been passed on."""
        try:
            with closing(happenings):  # or an exception in the callback would leave threads at work
                for happening in happenings:
                    self._pass_on(*happening)
        except KeyboardInterrupt:
            for unit in self._late:
                if unit.error is None and unit.spec not in self.finished:
                    self._pass_on("finished", unit.spec, unit)
            raise

    def _pass_on(self, kind: str, spec: KernelSpec, unit: PrewarmUnit | None) -> None:
        self.loaded += kind == "loaded"
        if unit is not None:
            self.finished[spec] = unit
        if self._on_event is not None:
            done, total = len(self.finished), self._total
            self._on_event(PrewarmEvent(kind=kind, spec=spec, unit=unit, done=done, total=total))
