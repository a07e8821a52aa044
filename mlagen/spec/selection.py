"""Which kernels a description of the calls to come leaves, of all that are supported."""

from __future__ import annotations

from collections.abc import Iterable

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.families import FAMILIES, specs_of
from mlagen.spec.kernel import KernelSpec

# What a call names, and the ingredients that hold it in one family or another.
FILTERS = {
    "dtype": ("query_dtype", "dtype"),
    "kv_lora_rank": ("kv_lora_rank", "head_dim_vo"),
    "page_size": ("page_size",),
}


def select_specs(
    archs: Iterable[Arch],
    *,
    families: Iterable[str] | None = None,
    heads: int | Iterable[int] | None = None,
    q_len: int | Iterable[int] | None = None,
    wanted: dict[str, str | int | Iterable[str | int]],
) -> list[KernelSpec]:
    """Return the kernels that the arguments of :func:`mlagen.prewarm` leave, each once.

    Raises
    ------
    ArgumentError
        If a family, an ingredient or a value does not exist, or a number is below 1.
    """
    rows = _rows(heads, q_len)
    chosen = tuple(FAMILIES) if families is None else tuple(families)
    specs: dict[KernelSpec, None] = {}
    for arch in archs:
        known = {name for spec in specs_of(arch, chosen) for name in spec.ingredients()} - {"arch"}
        kept: dict[str, list[str]] = {}
        for label, values in wanted.items():
            texts = [str(value) for value in _several(values)]
            kept |= dict.fromkeys(_ingredients_of(label, known), texts)
        for spec in specs_of(arch, chosen, **kept):
            if not rows or any(spec.serves(count) for count in rows):
                specs[spec] = None
    return list(specs)


def _ingredients_of(label: str, known: set[str]) -> list[str]:
    names = [name for name in FILTERS.get(label, (label,)) if name in known]
    if not names:
        labels = dict.fromkeys((*FILTERS, *sorted(known)))
        raise ArgumentError(f"filter: expected one of {', '.join(labels)}, got {label!r}")
    return names


def _several(values: str | int | Iterable[str | int]) -> tuple[str | int, ...]:
    return (values,) if isinstance(values, (str, int)) else tuple(values)


def _rows(heads: int | Iterable[int] | None, q_len: int | Iterable[int] | None) -> set[int]:
    """Return the rows of the calls, heads times query tokens; none if they are not said."""
    if heads is None:
        if q_len is not None:
            raise ArgumentError(f"q_len: expected heads beside it, got {q_len} alone")
        return set()
    counts = _counts("heads", heads)
    lengths = _counts("q_len", 1 if q_len is None else q_len)
    return {count * length for count in counts for length in lengths}


def _counts(argument: str, values: int | Iterable[int]) -> list[int]:
    counts = [values] if isinstance(values, int) else list(values)
    for count in counts:
        if count < 1:
            raise ArgumentError(f"{argument}: expected 1 or more, got {count}")
    return counts
