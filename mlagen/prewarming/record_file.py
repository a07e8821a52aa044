"""Record files: the kernels that runs requested, written with ``MLAGEN_RECORD``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from mlagen.errors import ArgumentError
from mlagen.prewarming.files import read_input_file
from mlagen.prewarming.gpus import parse_archs
from mlagen.spec.calls import specs_on_arch
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.text import parse_spec

_logger = logging.getLogger("mlagen")


def read_record(path: Path, *, archs: str | Iterable[str] | None = None) -> list[KernelSpec]:
    """Return the kernels of a record, without duplicates.

    With ``archs``, return the kernels that the same calls take on these architectures instead. An
    incomplete line, from a run that ended while writing it, is skipped with a warning.

    Raises
    ------
    ArgumentError
        If the file cannot be read, or a line is not a record of a kernel; the message names both.
    UnsupportedError
        If ``native`` finds no supported GPU.
    """
    content = read_input_file(path)
    specs: dict[KernelSpec, None] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        if _is_incomplete(line):
            _logger.warning("%s:%d: skipped a line without its end", path, number)
            line = line[max(line.rfind(b'{"'), 0) :]  # noqa: PLW2901 - of a later run, behind it
            if _is_incomplete(line):
                continue
        try:
            specs[_kernel_of(line)] = None
        except ValueError as error:
            raise ArgumentError(f"{path}:{number}: {error}") from error
    if archs is None:
        return list(specs)
    wanted = parse_archs(archs)
    elsewhere = (other for spec in specs for arch in wanted for other in specs_on_arch(spec, arch))
    return list(dict.fromkeys(elsewhere))


def _is_incomplete(line: bytes) -> bool:
    """Whether a line begins as a record and is none, maybe with a later record behind its half."""
    if line.startswith(b"{"):
        try:
            json.loads(line)
        except json.JSONDecodeError:
            return True
        except (ValueError, RecursionError):  # complete; the caller rejects it
            pass
    return False


def _kernel_of(line: bytes) -> KernelSpec:
    try:
        record = json.loads(line)
        kernel = record["kernel"] if isinstance(record, dict) else None
    except (ValueError, KeyError, RecursionError):
        kernel = None
    if not isinstance(kernel, str):
        text = line.decode(errors="replace")
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ArgumentError(f'expected a record such as {{"kernel": "..."}}, got {shown!r}')
    return parse_spec(kernel)
