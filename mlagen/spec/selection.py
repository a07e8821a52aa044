"""Kernel selection for prewarming: supported kernels filtered by the calls to come."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.families import FAMILIES, filter_specs, specs_of, values_of
from mlagen.spec.kernel import CallShape, KernelSpec
from mlagen.spec.mla.variant import MAX_HEADS, SUPPORTED, output_dtype
from mlagen.values import as_list, as_str_list, reject, require_whole_number, shown

# Filter names of the user, and the key fields they match in each family.
FILTERS = {
    "dtype": ("query_dtype", "dtype"),
    "kv_lora_rank": ("kv_lora_rank", "head_dim_vo"),
    "head_dim": ("head_dim", "head_dim_vo"),
    "page_size": ("page_size",),
}

# Values of key fields that no filter names.
DEFAULT_FILTERS = {"lookup": ["paged"], "values": ["shared"], "mask": ["causal"]}


def select_specs(
    archs: Iterable[Arch],
    *,
    families: Iterable[str] | None = None,
    heads: int | Iterable[int] | None = None,
    kv_heads: int | Iterable[int] | None = None,
    q_len: int | Iterable[int] | None = None,
    wanted: dict[str, str | int | Iterable[str | int]],
) -> list[KernelSpec]:
    """Return the kernels that match the arguments of :func:`mlagen.prewarm`, each once.

    Raises
    ------
    ArgumentError
        If a family, a key field or a value does not exist, or a number is out of range.
    """
    calls = _calls(heads, kv_heads, q_len)
    unserved = set(calls)
    chosen = tuple(FAMILIES) if families is None else tuple(as_str_list(families, "family"))
    specs: dict[KernelSpec, None] = {}
    for arch in archs:
        listed = specs_of(arch, chosen)
        if not listed:  # the families support other architectures only
            continue
        known = {name for spec in listed for name in spec.key_fields()} - {"arch"}
        filters = {name: list(values) for name, values in DEFAULT_FILTERS.items() if name in known}
        filters |= {name: [] for label in wanted for name in _key_fields_of(label, known)}
        for label, values in wanted.items():
            for name in _key_fields_of(label, known):
                filters[name] += [_text(name, value) for value in as_list(values, label)]
        if "head_dim_vo" in filters and "head_dim_vo" not in wanted:
            for label in {"kv_lora_rank", "head_dim"} - set(wanted):
                filters["head_dim_vo"] += values_of(listed, label)  # all dims by default
        for spec in filter_specs(listed, filters):
            served = {call for call in calls if spec.serves(call)}
            if served or not calls:
                specs[spec] = None
            unserved -= served
    count = max((call.heads for call in unserved), default=0)
    if count > MAX_HEADS:
        reject("heads", f"{MAX_HEADS} or less for MLA kernels", count)
    return list(specs)


def _text(field: str, value: str | int) -> str:
    """Return a value as the key field spells it: ``dtype`` of a combine kernel is the output's."""
    if not isinstance(value, str):
        value = str(require_whole_number(value, field))
    outputs = {str(row.query_dtype): str(output_dtype(row.query_dtype)) for row in SUPPORTED}
    return outputs.get(value, value) if field == "dtype" else value


def _key_fields_of(label: str, known: set[str]) -> list[str]:
    names = [name for name in FILTERS.get(label, (label,)) if name in known]
    if not names:
        labels = dict.fromkeys((*FILTERS, *sorted(known)))
        raise ArgumentError(f"filter: expected one of {', '.join(labels)}, got {label!r}")
    return names


def _calls(
    heads: int | Iterable[int] | None,
    kv_heads: int | Iterable[int] | None,
    q_len: int | Iterable[int] | None,
) -> set[CallShape]:
    """Return the shapes of the calls; none without ``heads``."""
    if heads is None:
        for name, value in (("q_len", q_len), ("kv_heads", kv_heads)):
            if value is not None:
                reject(name, "heads beside it", f"{shown(value)} alone")
        return set()
    counts = _counts("heads", heads)
    lengths = _counts("q_len", 1 if q_len is None else q_len)
    groups: list[int | None] = [None]
    if kv_heads is not None:
        groups = [*_counts("kv_heads", kv_heads)]
    for count, group in product(counts, groups):
        if group is not None and count % group:
            raise ArgumentError(f"heads: expected a multiple of kv_heads {group}, got {count}")
    return {
        CallShape(heads=count, kv_heads=group, q_len=length)
        for count, group, length in product(counts, groups, lengths)
    }


def _counts(argument: str, values: object) -> list[int]:
    return [
        require_whole_number(value, argument, min_value=1) for value in as_list(values, argument)
    ]
