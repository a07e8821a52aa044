"""Kernels as users name them: a spec text, which may leave out what is the default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlagen.spec.arch import Arch
    from mlagen.spec.kernel import KernelSpec

# Values of a kernel whose text does not name them, besides those of prewarming.
_DEFAULTS = {"query_dtype": "bf16", "head_dim": "128", "head_dim_vo": "512", "page_size": "64"}
_WITHOUT_GPU = "sm_90a"


def spec_named(text: str, arch: Arch | None = None) -> KernelSpec:
    """Return the kernel that a text names: a spec, a family, or a family with some of its values.

    A value that the text leaves out is a default. The target is ``arch``, by default that of the
    text, else of the first GPU that the family has kernels for, else sm_90a, else the first one
    that the family has kernels for. Raises ArgumentError if the text is malformed, or no call uses
    such a kernel; the message has the nearest one.
    """
    family, given = _split(f"{text}()" if text.isidentifier() else text)
    return _filled(family, given, arch)


def _filled(family: str, given: dict[str, str], arch: Arch | None) -> KernelSpec:
    """Return the kernel with the given values, and default values otherwise."""
    from mlagen.errors import ArgumentError
    from mlagen.spec.arch import parse_arch
    from mlagen.spec.text import key_field_names, parse_spec, specs_like

    if given.keys() == set(key_field_names(family)):
        spec = parse_spec(_text(family, given))
        return spec if arch is None or arch == spec.arch else _on_arch(spec, arch)
    if arch is None and "arch" in given:
        arch = parse_arch(given["arch"])
    known = _listed(family, arch)
    given = {**given, "arch": str(known[0].arch)}
    fields = _nearest(known, given).key_fields() | given
    # Beyond the kernels of prewarming there are others: with another page size, for one.
    text = _text(family, fields)
    try:
        return parse_spec(text)
    except ArgumentError:
        # The nearest kernel may have the tile of another head dim.
        of_calls = [spec for spec in specs_like(text) if given.items() <= spec.key_fields().items()]
        if not of_calls:
            raise
        return _nearest(of_calls, given)


def _text(family: str, fields: Mapping[str, str]) -> str:
    return f"{family}({', '.join(f'{name}={value}' for name, value in fields.items())})"


def arch_named(text: str | None) -> Arch | None:
    """Return the target that ``text`` names, if any."""
    from mlagen.spec.arch import parse_arch

    return None if text is None else parse_arch(text)


def spec_texts(typed: str) -> list[str]:
    """Return the families, or behind an opening bracket the kernels of one, for completion."""
    from mlagen.spec.families import FAMILIES

    family, bracket, _ = typed.partition("(")
    return [str(spec) for spec in _listed(family, None)] if bracket else list(FAMILIES)


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Return the family and the given values; the error has the most similar family, if any is."""
    from difflib import get_close_matches

    from mlagen.errors import ArgumentError
    from mlagen.spec.families import FAMILIES
    from mlagen.spec.text import split_spec

    try:
        return split_spec(text)
    except ArgumentError as error:
        family = text.partition("(")[0].strip()
        similar = [] if family in FAMILIES else get_close_matches(family, FAMILIES, n=1)
        if not similar:
            raise
        raise ArgumentError(f"{error}, did you mean {similar[0]}?") from None


def _listed(family: str, arch: Arch | None) -> list[KernelSpec]:
    """Return the kernels of a family that prewarming compiles for ``arch``, at least one."""
    from mlagen.errors import ArgumentError
    from mlagen.prewarming.machine import visible_archs
    from mlagen.spec.arch import ARCHS, parse_arch
    from mlagen.spec.families import FAMILIES, require_families

    require_families([family])
    list_kernels = FAMILIES[family]
    preferred = [arch] if arch else [*visible_archs().values(), parse_arch(_WITHOUT_GPU), *ARCHS]
    for target in preferred:
        if found := list(list_kernels(target)):
            return found
    served = ", ".join(str(other) for other in ARCHS if any(list_kernels(other)))
    raise ArgumentError(f"arch: expected {served} for {family}, got {arch}")


def _nearest(specs: Iterable[KernelSpec], given: Mapping[str, str]) -> KernelSpec:
    """Return the kernel with the most given values; of several, that with the most defaults."""
    from mlagen.spec.families import DEFAULT_FILTERS

    defaults = _DEFAULTS | {name: values[0] for name, values in DEFAULT_FILTERS.items()}
    in_order = (given.items(), defaults.items())
    return max(
        specs, key=lambda spec: [len(values & spec.key_fields().items()) for values in in_order]
    )


def _on_arch(spec: KernelSpec, arch: Arch) -> KernelSpec:
    """Return the kernel that calls of ``spec`` use on another target; the tile may differ."""
    from mlagen.spec.families import specs_on_arch

    _listed(spec.family, arch)  # raises if there is none
    found = [other for other in specs_on_arch(spec, arch) if other.family == spec.family]
    return _nearest(found, spec.key_fields())
