"""Targets of the visible GPUs: architectures to compile for, and devices to load on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.runtime.device import visible_devices
from mlagen.spec.arch import Arch, arch_of_capability, parse_arch
from mlagen.spec.kernel import KernelSpec
from mlagen.values import as_str_list


def visible_archs() -> dict[int, Arch]:
    """Return the targets of the visible GPUs by index; an unsupported GPU is skipped."""
    archs = {}
    for device in visible_devices():
        with suppress(ArgumentError):
            archs[device.index] = arch_of_capability(device.major, device.minor)
    return archs


def parse_archs(archs: str | Iterable[str]) -> list[Arch]:
    """Return the targets of these names, without duplicates; ``native`` is the visible GPUs.

    Raises
    ------
    ArgumentError
        If a name is not a target.
    UnsupportedError
        If ``native`` finds no supported GPU.
    """
    names = as_str_list(archs, "arch")
    found: dict[Arch, None] = {}
    for name in names:
        if name != "native":
            found[parse_arch(name)] = None
        elif native := visible_archs():
            found.update(dict.fromkeys(native.values()))
        else:
            got = ", ".join(f"{gpu.name} ({gpu.major}.{gpu.minor})" for gpu in visible_devices())
            raise UnsupportedError(
                f"arch: expected a supported GPU for native, got {got or 'none'}; "
                f"name targets instead, such as sm_90a"
            )
    return list(found)


def devices_for(specs: Sequence[KernelSpec]) -> dict[int, Arch]:
    """Return the visible GPUs that match a target of the kernels, with their targets.

    Raises
    ------
    UnsupportedError
        If there is none.
    """
    visible = visible_archs()
    archs = {spec.arch for spec in specs}
    devices = {index: arch for index, arch in visible.items() if arch in archs}
    if not devices:
        wanted = ", ".join(map(str, sorted(archs)))
        got = ", ".join(map(str, sorted(set(visible.values())))) or "none"
        raise UnsupportedError(f"load: expected a visible GPU for {wanted}, got {got}")
    return devices
