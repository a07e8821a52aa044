"""Processes that modes bind even where the tests run as root."""

from __future__ import annotations

import ctypes
import os

_VERSION_3 = 0x20080522  # of linux/capability.h


def give_up_capabilities() -> None:
    """Make this process one that may do what owners and modes say, and no more."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
