"""Files of bytes by name, in the safetensors format, which other programs read too.

Written one tensor at a time, so that a dump takes no second copy of a KV cache. A file from
elsewhere is data only: names, sizes and bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from mlagen.errors import ArgumentError
from mlagen.paths import open_named, reason_of

_CHUNK = 1 << 26
_MAX_HEADER_BYTES = 4 << 20


def write_tensors(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write uint8 tensors of one axis, from any device."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel()
        header[name] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        on_cpu = tensor.detach().cpu()
        for start in range(0, on_cpu.numel(), _CHUNK):
            size = min(_CHUNK, on_cpu.numel() - start)
            file.write(ctypes.string_at(on_cpu.data_ptr() + start, size))


def read_tensors(path: Path, max_bytes: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of :func:`write_tensors`, on the CPU.

    Raises ArgumentError if it is no such file, or has more than ``max_bytes`` of contents.
    """
    try:
        with open_named(path) as file:
            return _read(file, max_bytes)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        got = reason_of(error) if isinstance(error, OSError) else "another"
        raise ArgumentError(f"{path}: expected a file of dumped tensors, got {got}") from error


def _read(file: IO[bytes], max_bytes: int) -> dict[str, torch.Tensor]:
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise ValueError
    header: dict[str, Any] = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    begin, file_bytes = 8 + header_bytes, os.fstat(file.fileno()).st_size
    total, tensors = 0, {}
    for name, entry in header.items():
        start, end = map(int, entry["data_offsets"])
        size = end - start
        total += size
        if total > max_bytes:
            raise OSError(0, f"more than {max_bytes >> 30} GiB of contents")
        # Before any memory is taken for it.
        if entry["dtype"] != "U8" or entry["shape"] != [size] or not 0 <= start <= end:
            raise ValueError
        if begin + end > file_bytes:
            raise ValueError
        file.seek(begin + start)
        content = bytearray(max(size, 1))
        file.readinto(memoryview(content)[:size])  # type: ignore[attr-defined]
        tensors[name] = torch.frombuffer(content, dtype=torch.uint8)[:size]
    return tensors
