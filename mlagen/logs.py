"""The handler of the ``mlagen`` logger that ``MLAGEN_LOG`` asks for."""

from __future__ import annotations

import logging
import sys

LOG_LEVELS = {
    "off": logging.CRITICAL + 1,  # mlagen logs nothing that high
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_FORMAT = "%(asctime)s %(levelname)s mlagen[%(process)d]: %(message)s"


class StderrHandler(logging.Handler):
    """Writes to stderr what no handler of the application gets.

    An application may configure logging before or after mlagen's first call. Where it has, a
    second line for each record would be one too many.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, to the stderr of this moment."""
        if self._has_others() or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler of logging
            self.handleError(record)

    def _has_others(self) -> bool:
        logger = logging.getLogger("mlagen")
        inherited = logging.getLogger().handlers if logger.propagate else []
        return any(handler is not self for handler in (*logger.handlers, *inherited))


def set_up_logging(level: str | None) -> None:
    """Have the ``mlagen`` logger log from a level of ``LOG_LEVELS`` on; None leaves it alone."""
    if level is None:
        return
    logger = logging.getLogger("mlagen")
    logger.setLevel(LOG_LEVELS[level])
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
