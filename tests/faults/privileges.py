"""Processes that obey file modes even if the tests run as root."""

from __future__ import annotations

import ctypes
import os

_VERSION_3 = 0x20080522  # from linux/capability.h


def give_up_capabilities() -> None:
    """Drop the capabilities that bypass owners and modes."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
