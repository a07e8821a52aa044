"""Worker process: builds one kernel and writes the outcome to stdout."""

from __future__ import annotations

import os
import threading

from mlagen.prewarming.build import build_in_process
from mlagen.prewarming.isolation import unit_to_json
from mlagen.spec.text import parse_spec


def main(kernel: str) -> None:
    """Build the kernel of this text; exits when the parent closes the stdin pipe."""
    # Output of libraries goes to stderr.
    answer = os.dup(1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    text = unit_to_json(build_in_process(parse_spec(kernel)))
    with os.fdopen(answer, "w") as stream:
        stream.write(text)


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when all write ends are closed
    os._exit(1)
