"""The visible GPUs as targets: what to compile for, and where to load."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.runtime.device import visible_devices
from mlagen.spec.arch import Arch, arch_of_capability, parse_arch
from mlagen.spec.kernel import KernelSpec
from mlagen.values import texts


def visible_archs() -> dict[int, Arch]:
    """Return the targets of the visible GPUs by their index; a GPU that none serves is left out."""
    archs = {}
    for facts in visible_devices():
        with suppress(ArgumentError):
            archs[facts.index] = arch_of_capability(facts.major, facts.minor)
    return archs


def archs_of(archs: str | Iterable[str]) -> list[Arch]:
    """Return the targets of these names, each once; ``native`` is those of the visible GPUs.

    Raises
    ------
    ArgumentError
        If a name is none of a target.
    UnsupportedError
        If ``native`` finds no GPU to serve.
    """
    names = texts(archs, "arch")
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
    """Return the visible GPUs that some of the kernels are for, with their targets.

    Raises
    ------
    UnsupportedError
        If there is none.
    """
    visible = visible_archs()
    archs = {spec.arch for spec in specs}
    devices = {index: arch for index, arch in visible.items() if arch in archs}
    if not devices:
        asked = ", ".join(map(str, sorted(archs)))
        got = ", ".join(map(str, sorted(set(visible.values())))) or "none"
        raise UnsupportedError(f"load: expected a visible GPU for {asked}, got {got}")
    return devices
