"""ctypes binding of the NVRTC library of one file.

Symbols are resolved in the handle of that file. cuda.bindings searches for the library by its own
rules, and prefers global symbols of another library, such as the NVRTC of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlagen.errors import ToolchainError
from mlagen.fork_safety import defer_forks


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of one compilation."""

    log: str
    code: bytes
    error: str | None  # reason of the failure


@cache
def load_nvrtc(path: Path) -> NvrtcLibrary:
    """Load the library at ``path``, once a process.

    Raises
    ------
    ToolchainError
        If it cannot be loaded.
    """
    try:
        with defer_forks():  # a child cannot load a library that another thread was loading
            return NvrtcLibrary(path)
    except (OSError, AttributeError) as error:  # AttributeError: a function is missing
        raise ToolchainError(f"NVRTC: cannot load {path}: {error}") from error


class NvrtcLibrary:
    """A loaded NVRTC; its functions may be called from several threads at once."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        # NVRTC opens its builtins by name, and LD_LIBRARY_PATH may contain another version.
        builtins = path.with_name(f"libnvrtc-builtins.so.{major.value}.{minor.value}")
        if builtins.is_file():
            with suppress(OSError):  # a compilation reports missing builtins
                self._builtins = ctypes.CDLL(str(builtins))

    def supported_archs(self) -> list[int]:
        """Return the numbers of the supported architectures."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return list(numbers)

    def compile(
        self, text: str, name: str, options: Sequence[str], *, result: str = "CUBIN"
    ) -> Compiled:
        """Compile a source to a cubin, or with ``result="PTX"`` to PTX."""
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            text.encode(),
            name.encode(),
            0,
            None,
            None,
        )
        try:
            c_options = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self._library.nvrtcCompileProgram(program, len(options), c_options)
            log = self._read(program, "nvrtcGetProgramLog").decode(errors="replace")
            code = b"" if status else self._read(program, f"nvrtcGet{result}")
            return Compiled(log=log, code=code, error=self._name_of(status) if status else None)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(function, program, content)
        return content.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise ToolchainError(f"NVRTC: {function}: {self._name_of(status)}")

    def _name_of(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())
