"""Kernel families, and which of their kernels an architecture, a call or a prewarming takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import TypeVar

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.combine import (
    CombineSpec,
    CombineStatesSpec,
    combine_spec,
    combine_specs,
    combine_states_specs,
)
from mlagen.spec.gqa import sm80 as gqa_sm80
from mlagen.spec.gqa import sm90 as gqa_sm90
from mlagen.spec.gqa.sm80 import GqaSm80Spec
from mlagen.spec.gqa.sm90 import GqaSm90Spec
from mlagen.spec.gqa.variant import GqaVariant, gqa_variants
from mlagen.spec.kernel import CallShape, KernelSpec
from mlagen.spec.mla import sm80 as mla_sm80
from mlagen.spec.mla import sm90 as mla_sm90
from mlagen.spec.mla.sm80 import MlaSm80Spec
from mlagen.spec.mla.sm90 import MlaSm90Fp8KvSpec, MlaSm90Fp8Spec, MlaSm90Spec
from mlagen.spec.mla.variant import MAX_HEADS, SUPPORTED, MlaVariant, mla_variants, output_dtype
from mlagen.spec.write_rows import WriteRowsSpec, write_rows_specs
from mlagen.values import as_list, as_str_list, reject, require_whole_number, shown

# Row counts that together select every tile, largest first.
_ROW_COUNTS = sorted(
    {tile.block_m for tile in (*mla_sm80.TILES, *gqa_sm80.TILES)}
    | {*mla_sm90.BLOCK_MS, *gqa_sm90.BLOCK_MS},
    reverse=True,
)
Variant = TypeVar("Variant")


def _of_calls(
    variants: Callable[[], Iterable[Variant]],
    kernels: Callable[[Arch, Variant, int], Iterable[KernelSpec | None]],
) -> Callable[[Arch], Iterator[KernelSpec]]:
    """Return the function that yields each kernel of some calls on an architecture once."""

    def listed(arch: Arch) -> Iterator[KernelSpec]:
        for variant in variants():
            found = (spec for rows in _ROW_COUNTS for spec in kernels(arch, variant, rows))
            yield from dict.fromkeys(spec for spec in found if spec is not None)

    return listed


def _gqa_sm90_kernels(arch: Arch, variant: GqaVariant, rows: int) -> list[GqaSm90Spec]:
    # Scales of tokens are beside their rows, or behind them.
    specs = (
        gqa_sm90.gqa_sm90_spec(arch, variant, rows, has_unaligned_rows=is_unaligned)
        for is_unaligned in (False, True)
    )
    return [each for spec in specs if spec is not None for each in gqa_sm90.with_all_heads(spec)]


_LISTED: dict[type[KernelSpec], Callable[[Arch], Iterator[KernelSpec]]] = {
    MlaSm80Spec: _of_calls(mla_variants, mla_sm80.mla_sm80_specs),
    MlaSm90Spec: _of_calls(mla_variants, lambda *call: [MlaSm90Spec.of(*call)]),
    MlaSm90Fp8Spec: _of_calls(mla_variants, lambda *call: [MlaSm90Fp8Spec.of(*call)]),
    MlaSm90Fp8KvSpec: _of_calls(mla_variants, lambda *call: [MlaSm90Fp8KvSpec.of(*call)]),
    GqaSm80Spec: _of_calls(gqa_variants, lambda *call: [gqa_sm80.gqa_sm80_spec(*call)]),
    GqaSm90Spec: _of_calls(gqa_variants, _gqa_sm90_kernels),
    CombineSpec: combine_specs,
    CombineStatesSpec: combine_states_specs,
    WriteRowsSpec: write_rows_specs,
}
# The functions that yield the supported kernels of an architecture, and the classes of the specs.
FAMILIES = {spec.family: listed for spec, listed in _LISTED.items()}
SPEC_CLASSES = {spec.family: spec for spec in _LISTED}

# Filter names of the user, and the key fields they match in each family.
FILTERS = {
    "dtype": ("query_dtype", "dtype"),
    "kv_lora_rank": ("kv_lora_rank", "head_dim_vo"),
    "head_dim": ("head_dim", "head_dim_vo"),
    "page_size": ("page_size",),
}

# Values that pass every filter: kernels over two pools take any page sizes, and values as wide as
# keys have no dim of their own.
_ANY_VALUE = {"page_size": ("0",), "head_dim_vo": ("0",)}

# Values of key fields that no filter names.
DEFAULT_FILTERS = {"lookup": ["paged"], "values": ["shared"], "mask": ["causal"]}


def specs_of(
    arch: Arch, families: Collection[str] = tuple(FAMILIES), **wanted: Collection[str]
) -> list[KernelSpec]:
    """Return the supported kernels for ``arch`` of some families.

    ``wanted`` has the allowed values by key field, such as ``query_dtype`` or ``page_size``; a
    kernel without the field passes. Raises ArgumentError if a family is unknown, or no kernel has
    one of the values.
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
    """Return the specs that match every filter; a spec without the field, or for any, matches.

    Raises ArgumentError if none of them has one of the values.
    """
    for label, values in wanted.items():
        known = values_of(specs, label)
        for value in values:
            if value not in known:
                raise ArgumentError(f"{label}: expected one of {', '.join(known)}, got {value!r}")
        passing = {None, *values, *_ANY_VALUE.get(label, ())}
        specs = [spec for spec in specs if spec.key_fields().get(label) in passing]
    return specs


def values_of(specs: Iterable[KernelSpec], label: str) -> list[str]:
    """Return the distinct values of a key field among ``specs``."""
    found = (spec.key_fields() for spec in specs)
    return list(dict.fromkeys(named[label] for named in found if label in named))


def mla_call_specs(arch: Arch, variant: MlaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of MLA calls with ``rows`` query rows per sequence.

    The sm90 kernels, if any: one per tile, for every ``p_dtype_choice``; the sm80 kernels, which
    small calls use on sm90 too; and the kernel that combines their splits. Raises UnsupportedError
    if no kernel supports the variant.
    """
    sm80 = mla_sm80.mla_sm80_specs(arch, variant, rows)
    sm90 = [
        replace(spec, block_m=tile)
        for spec in mla_sm90.mla_sm90_kernels(arch, variant, rows)
        for tile in reversed(spec.tiles_of(rows))
    ]
    return [*sm90, *sm80, combine_spec(sm80[0])]


def gqa_call_specs(arch: Arch, variant: GqaVariant, rows: int) -> list[KernelSpec]:
    """Return the kernels of GQA calls with ``rows`` query rows per sequence and KV head.

    The sm90 kernel, if any, for every number of KV heads per CTA, and both places of token scales;
    the sm80 kernel; and the kernel that combines its splits. Raises UnsupportedError if no kernel
    supports the variant.
    """
    sm80 = gqa_sm80.gqa_sm80_spec(arch, variant, rows)
    return [*_gqa_sm90_kernels(arch, variant, rows), sm80, combine_spec(sm80)]


def specs_of_variant(spec: KernelSpec) -> list[KernelSpec]:
    """Return the kernels of the family with the variant of ``spec``: all tiles and head counts.

    Raises UnsupportedError if the family does not support the variant.
    """
    specs = [other for rows in _ROW_COUNTS for other in _call_specs_of(spec)(spec.arch, rows)]
    return [other for other in dict.fromkeys(specs) if other.family == spec.family]


def batch_invariant(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Return the kernels of batch-invariant calls for those of other calls, without duplicates."""
    made = dict.fromkeys(map(_batch_invariant, specs))
    # Such calls take the sm80 kernel where the sm90 one does not cover them.
    return [
        spec
        for spec in made
        if not isinstance(spec, GqaSm90Spec)
        or gqa_sm90.gqa_sm90_spec(spec.arch, spec.variant, spec.block_m) is not None
    ]


def _batch_invariant(spec: KernelSpec) -> KernelSpec:
    if isinstance(spec, CombineSpec):
        return replace(spec, batch_invariant=True)
    if isinstance(spec, (MlaSm80Spec, MlaSm90Spec)):
        return replace(spec, variant=replace(spec.variant, batch_invariant=True))
    if isinstance(spec, (GqaSm80Spec, GqaSm90Spec)):
        return replace(spec, variant=replace(spec.variant, batch_invariant=True))
    return spec


def specs_on_arch(spec: KernelSpec, arch: Arch) -> list[KernelSpec]:
    """Return the kernels that calls of ``spec`` may use on another architecture.

    One kernel may map to several: tiles and the decision to split differ by architecture.
    """
    if isinstance(spec, (CombineSpec, CombineStatesSpec, WriteRowsSpec)):
        return [replace(spec, arch=arch)]
    call_specs = _call_specs_of(spec)
    found = [call_specs(arch, rows) for rows in _ROW_COUNTS if spec in call_specs(spec.arch, rows)]
    return list(dict.fromkeys(other for others in found for other in others))


def _call_specs_of(spec: KernelSpec) -> Callable[[Arch, int], list[KernelSpec]]:
    """Return the function from (arch, rows) to the kernels of calls with the variant."""
    if isinstance(spec, (MlaSm80Spec, MlaSm90Spec)):
        mla_variant = spec.variant
        return lambda arch, rows: mla_call_specs(arch, mla_variant, rows)
    assert isinstance(spec, (GqaSm80Spec, GqaSm90Spec)), spec
    gqa_variant = spec.variant
    return lambda arch, rows: gqa_call_specs(arch, gqa_variant, rows)


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

    Raises ArgumentError if a family, a key field or a value does not exist, or a number is out of
    range.
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
        filters |= {name: [] for label in wanted for name in _fields_of_filter(label, known)}
        for label, values in wanted.items():
            for name in _fields_of_filter(label, known):
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


def _fields_of_filter(label: str, known: set[str]) -> list[str]:
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
