"""Resource usage in the compile log, as ptxas prints it."""

from __future__ import annotations

import re

from mlagen.artifacts import Resources

_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)'")
_FRAME = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<store>\d+) bytes spill stores, "
    r"(?P<load>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers(?P<rest>.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_resources(log: str) -> tuple[Resources, ...]:
    """Return the resources of every entry function in the log of ``--ptxas-options=-v``."""
    found = []
    for section in re.split(r"(?=Compiling entry function ')", log)[1:]:
        entry, frame, used = (p.search(section) for p in (_ENTRY, _FRAME, _USED))
        if entry is None or frame is None or used is None:
            continue
        shared = _SHARED.search(used["rest"])
        found.append(
            Resources(
                symbol=entry["symbol"],
                registers=int(used["registers"]),
                stack_bytes=int(frame["stack"]),
                spill_store_bytes=int(frame["store"]),
                spill_load_bytes=int(frame["load"]),
                static_shared_bytes=int(shared[1]) if shared else 0,
            )
        )
    return tuple(found)
