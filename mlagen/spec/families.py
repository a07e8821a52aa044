"""Kernel families, and the supported kernels of each architecture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.combine import combine_specs, combine_states_specs
from mlagen.spec.gqa.sm80 import gqa_sm80_specs
from mlagen.spec.gqa.sm90 import gqa_sm90_specs
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm80 import mla_sm80_specs
from mlagen.spec.mla.sm90 import mla_sm90_fp8_specs, mla_sm90_fp8kv_specs, mla_sm90_specs

FAMILIES: dict[str, Callable[[Arch], Iterator[KernelSpec]]] = {
    "mla_sm80": mla_sm80_specs,
    "mla_sm90": mla_sm90_specs,
    "mla_sm90_fp8": mla_sm90_fp8_specs,
    "mla_sm90_fp8kv": mla_sm90_fp8kv_specs,
    "gqa_sm80": gqa_sm80_specs,
    "gqa_sm90": gqa_sm90_specs,
    "combine": combine_specs,
    "combine_states": combine_states_specs,
}


def specs_of(
    arch: Arch, families: Collection[str] = tuple(FAMILIES), **wanted: Collection[str]
) -> list[KernelSpec]:
    """Return the supported kernels for ``arch``.

    Parameters
    ----------
    families
        Names out of :data:`FAMILIES`.
    wanted
        Allowed values by key field, such as ``query_dtype`` or ``page_size``.
        A kernel without the field passes the filter.

    Raises
    ------
    ArgumentError
        If a family is unknown, or no kernel has one of the values.
    """
    require_families(families)
    specs = [spec for family in families for spec in _made(FAMILIES[family], arch)]
    return filter_specs(specs, wanted)


@lru_cache
def _made(make: Callable[[Arch], Iterator[KernelSpec]], arch: Arch) -> tuple[KernelSpec, ...]:
    """Return the kernels of a family; selections of one process enumerate them repeatedly."""
    return tuple(make(arch))


def require_families(names: Iterable[str]) -> None:
    """Raise :class:`ArgumentError` unless every name is a kernel family."""
    for name in names:
        if name not in FAMILIES:
            raise ArgumentError(f"family: expected one of {', '.join(FAMILIES)}, got {name!r}")


def filter_specs(
    specs: list[KernelSpec], wanted: Mapping[str, Collection[str]]
) -> list[KernelSpec]:
    """Return the specs that match every filter; a spec without the field matches.

    Raises
    ------
    ArgumentError
        If none of them has one of the values.
    """
    for label, values in wanted.items():
        known = values_of(specs, label)
        for value in values:
            if value not in known:
                raise ArgumentError(f"{label}: expected one of {', '.join(known)}, got {value!r}")
        specs = [spec for spec in specs if spec.key_fields().get(label) in {None, *values}]
    return specs


def values_of(specs: Iterable[KernelSpec], label: str) -> list[str]:
    """Return the distinct values of a key field among ``specs``."""
    found = (spec.key_fields() for spec in specs)
    return list(dict.fromkeys(named[label] for named in found if label in named))
