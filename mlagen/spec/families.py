"""Every kernel family, and the kernels that an architecture may be asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.combine import combine_specs
from mlagen.spec.gqa import gqa_sm80_specs
from mlagen.spec.gqa_sm90 import gqa_sm90_specs
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla import mla_sm80_specs
from mlagen.spec.mla_sm90 import mla_sm90_specs
from mlagen.spec.mla_sm90_fp8 import mla_sm90_fp8_specs
from mlagen.spec.mla_sm90_fp8kv import mla_sm90_fp8kv_specs

FAMILIES: dict[str, Callable[[Arch], Iterator[KernelSpec]]] = {
    "mla_sm80": mla_sm80_specs,
    "mla_sm90": mla_sm90_specs,
    "mla_sm90_fp8": mla_sm90_fp8_specs,
    "mla_sm90_fp8kv": mla_sm90_fp8kv_specs,
    "gqa_sm80": gqa_sm80_specs,
    "gqa_sm90": gqa_sm90_specs,
    "combine": combine_specs,
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
        For an ingredient of a spec, such as ``query_dtype`` or ``page_size``, the values to keep.
        A kernel without that ingredient is kept.

    Raises
    ------
    ArgumentError
        If a family, or a value that no kernel has, is named.
    """
    require_families(families)
    return kept_of([spec for family in families for spec in FAMILIES[family](arch)], wanted)


def require_families(names: Iterable[str]) -> None:
    """Raise :class:`ArgumentError` unless all names are those of families."""
    for name in names:
        if name not in FAMILIES:
            raise ArgumentError(f"family: expected one of {', '.join(FAMILIES)}, got {name!r}")


def kept_of(specs: list[KernelSpec], wanted: Mapping[str, Collection[str]]) -> list[KernelSpec]:
    """Return those of ``specs`` that have the wanted values, or do not know the ingredient.

    Raises
    ------
    ArgumentError
        If a value is wanted that none of them has.
    """
    for label, values in wanted.items():
        known = values_of(specs, label)
        for value in values:
            if value not in known:
                raise ArgumentError(f"{label}: expected one of {', '.join(known)}, got {value!r}")
        specs = [spec for spec in specs if spec.key_fields().get(label) in {None, *values}]
    return specs


def values_of(specs: Iterable[KernelSpec], label: str) -> list[str]:
    """Return the values of an ingredient that there are among ``specs``, each once."""
    found = (spec.key_fields() for spec in specs)
    return list(dict.fromkeys(named[label] for named in found if label in named))
