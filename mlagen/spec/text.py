"""Parser of kernel specs, the inverse of ``str(spec)``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.spec.arch import Arch, parse_arch
from mlagen.spec.combine import CombineSpec, CombineStatesSpec, combine_specs, combine_states_spec
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, SPEC_CLASSES, specs_of_variant
from mlagen.spec.gqa import variant as gqa
from mlagen.spec.kernel import KernelSpec, Variant
from mlagen.spec.mla.variant import SUPPORTED, TWO_POOLS, output_dtype
from mlagen.spec.write_rows import WriteRowsSpec, write_rows_specs
from mlagen.values import INT32_MAX

_TEXT = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_BOOLS = {"True": True, "False": False}


def parse_spec(text: str) -> KernelSpec:
    """Return the kernel that ``text`` names, in the format of ``str(spec)``.

    Only a kernel that some call uses is returned: dtypes, sizes and tile are those of a family.
    Blanks around names and values, and the order of the names, are ignored. Raises ArgumentError if
    the text is malformed, or no call uses the kernel.
    """
    spec = _spec_of(text)
    _require_used(spec)
    return spec


def specs_like(text: str) -> list[KernelSpec]:
    """Return the kernels of the family that calls of the variant of ``text`` use, with any tile.

    Raises ArgumentError if the text is malformed, or the family does not support the variant.
    """
    spec = _spec_of(text)
    try:
        return [other for other in _specs_like(spec) if other.family == spec.family]
    except UnsupportedError as error:
        raise ArgumentError(f"{spec.family}: {error}") from error


def _spec_of(text: str) -> KernelSpec:
    """Return the kernel of a whole text, whether a call uses it or not."""
    family, values = split_spec(text)
    if missing := [name for name in key_field_names(family) if name not in values]:
        inside = text[text.index("(") + 1 : text.rindex(")")]
        raise ArgumentError(f"{family}: expected {', '.join(missing)} too, got {inside!r}")
    spec = _construct(SPEC_CLASSES[family], family, values)
    assert isinstance(spec, KernelSpec)
    return spec


def split_spec(text: str) -> tuple[str, dict[str, str]]:
    """Return the family and the values by name, of which some may be missing.

    Raises ArgumentError if the text is malformed, or a name is not one of the family.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ArgumentError(f"kernel: expected family(name=value, ...), got {text!r}")
    family, inside = match[1], match[2]
    if family not in SPEC_CLASSES:
        raise ArgumentError(
            f"kernel: expected a family out of {', '.join(SPEC_CLASSES)}, got {family!r}"
        )
    return family, _parse_values(family, inside)


def key_field_names(family: str) -> list[str]:
    """Return the names of the key fields of a family, in the order of the text."""
    return list(_types_of(SPEC_CLASSES[family]))


def _parse_values(family: str, inside: str) -> dict[str, str]:
    """Return the text of each value by name."""
    types = _types_of(SPEC_CLASSES[family])
    values: dict[str, str] = {}
    for item in inside.split(",") if inside.strip() else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in types:
            raise ArgumentError(
                f"{family}: expected name=value with a name out of {', '.join(types)}, "
                f"got {item.strip()!r}"
            )
        if name in values:
            raise ArgumentError(f"{family}: expected {name} once, got it twice")
        values[name] = value
    return values


def _types_of(cls: type) -> dict[str, type]:
    """Return the types of the key fields, in the order of the text."""
    types: dict[str, type] = {}
    for name, kind in _fields_of(cls).items():
        types |= _types_of(kind) if _has_parts(kind) else {name: kind}
    return types


@cache
def _fields_of(cls: Any) -> dict[str, type]:
    """Return the fields of a dataclass or of a tile, with their types."""
    hints = get_type_hints(cls)
    names = cls._fields if issubclass(cls, tuple) else [field.name for field in fields(cls)]
    return {name: hints[name] for name in names}


def _has_parts(kind: type) -> bool:
    """Whether the text flattens the field: a variant or a tile."""
    return issubclass(kind, (Variant, tuple))


def _construct(cls: type, family: str, values: Mapping[str, str]) -> object:
    arguments: dict[str, object] = {
        name: _construct(kind, family, values)
        if _has_parts(kind)
        else _parse_value(kind, f"{family}.{name}", values[name])
        for name, kind in _fields_of(cls).items()
    }
    return cls(**arguments)


def _parse_value(kind: type, name: str, text: str) -> object:
    """Return the value of one key field."""
    if kind is Arch:
        return parse_arch(text)
    if kind is DType:
        names = [str(dtype) for dtype in DType]
        if text not in names:
            raise ArgumentError(f"{name}: expected one of {', '.join(names)}, got {text!r}")
        return DType(text)
    if kind is int:
        if not _NUMBER.fullmatch(text) or int(text) > INT32_MAX:
            raise ArgumentError(f"{name}: expected a whole number up to {INT32_MAX}, got {text!r}")
        return int(text)
    if kind is bool:
        if text not in _BOOLS:
            raise ArgumentError(f"{name}: expected {' or '.join(_BOOLS)}, got {text!r}")
        return _BOOLS[text]
    assert kind is str, kind
    return text


def _require_used(spec: KernelSpec) -> None:
    """Reject a kernel that no call uses: it is untested and may not compile."""
    named = spec.key_fields()
    has_two_pools = named.get("lookup") == TWO_POOLS[0]
    page_size = named.get("page_size")
    if page_size is not None and (page_size == "0") != has_two_pools:
        rule = "0 (two pools of any page sizes)" if has_two_pools else "1 or more"
        raise ArgumentError(f"{spec.family}.page_size: expected {rule}, got {page_size}")
    try:
        known = _specs_like(spec)
    except UnsupportedError as error:
        raise ArgumentError(f"{spec.family}: {error}") from error
    if spec in known:
        return
    rule = "a kernel that calls use"
    if others := known or list(FAMILIES[spec.family](spec.arch)):
        fields = spec.key_fields().items()
        nearest = max(others, key=lambda other: len(fields & other.key_fields().items()))
        rule += f", the nearest {nearest}"
    raise ArgumentError(f"{spec.family}: expected {rule}, got {spec}")


def _specs_like(spec: KernelSpec) -> Sequence[KernelSpec]:
    """Return kernels of calls with the variant of ``spec``, which is among them if it is used."""
    if isinstance(spec, CombineStatesSpec):
        used = combine_states_spec(spec.arch, spec.dtype, spec.head_dim_vo)
        return [] if used is None else [used]
    if isinstance(spec, WriteRowsSpec):
        return list(write_rows_specs(spec.arch))
    return _combine_specs(spec) if isinstance(spec, CombineSpec) else specs_of_variant(spec)


def _combine_specs(spec: CombineSpec) -> Sequence[KernelSpec]:
    """Return combine kernels, including ``spec`` if some call uses it."""
    for row in SUPPORTED:
        ranks = [rank for rank, _ in row.head_dims]
        is_of_mla = spec.dtype is output_dtype(row.query_dtype) and spec.head_dim_vo in ranks
        if is_of_mla and not spec.has_output_gate:
            return [spec]
    has_dtype = any(spec.dtype in row.out_dtypes for row in gqa.SUPPORTED)
    has_gate_for = spec.dtype.is_16bit or not spec.has_output_gate
    if has_dtype and has_gate_for and gqa.has_dim(spec.head_dim_vo):
        return [spec]
    return list(combine_specs(spec.arch))
