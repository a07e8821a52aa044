"""A process that builds one kernel and says on stdout what became of it."""

from __future__ import annotations

import os
import threading

from mlagen.prewarming.build import build_here
from mlagen.prewarming.isolation import unit_text
from mlagen.spec.text import parse_spec


def main(kernel: str) -> None:
    """Build the kernel of this text; ends with the process whose stdin pipe it has."""
    # Whatever libraries print is for people.
    answer = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    text = unit_text(build_here(parse_spec(kernel)))
    with os.fdopen(answer, "w") as stream:
        stream.write(text)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the last one that could write is gone
    os._exit(1)
