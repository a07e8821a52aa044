"""The handler and level of the ``mlagen`` logger for ``MLAGEN_LOG``, and what stderr gets."""

from __future__ import annotations

import logging
import re
import sys

LOG_LEVELS = {
    "off": logging.CRITICAL + 1,  # mlagen logs nothing that high
    "warn": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "api": logging.INFO,  # with a line for each call, in the logger mlagen.api
}
_FORMAT = "%(asctime)s %(levelname)s mlagen[%(process)d]: %(message)s"
_RARE = re.compile(r"[^ -~]")


def visible(text: str, *, kept: str = "\n\t") -> str:
    """Return a text with its control characters escaped, except those in ``kept``.

    A text from a file or another process would otherwise control the terminal.
    """
    if text.isprintable():
        return text

    def escaped(rare: re.Match[str]) -> str:
        is_safe = rare[0].isprintable() or rare[0] in kept
        return rare[0] if is_safe else rare[0].encode("unicode_escape").decode()

    return _RARE.sub(escaped, text)


class StderrHandler(logging.Handler):
    """Writes records to stderr unless the application has a handler for them.

    An application may configure logging before or after mlagen's first call, and must not get each
    record twice.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record to the current stderr."""
        if self._has_others(record.name) or sys.stderr is None:
            return
        try:
            sys.stderr.write(f"{visible(self.format(record))}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as logging's own handlers
            self.handleError(record)

    def _has_others(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def set_up_logging(level: str | None) -> None:
    """Set the ``mlagen`` logger to a level of ``LOG_LEVELS``, with a handler; None does nothing."""
    if level is None:
        return
    logger = logging.getLogger("mlagen")
    logger.setLevel(LOG_LEVELS[level])
    if not any(isinstance(handler, StderrHandler) for handler in logger.handlers):
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
