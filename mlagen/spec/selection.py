"""Which kernels a description of the calls to come leaves, of all that are supported."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from mlagen.errors import ArgumentError
from mlagen.spec.arch import Arch
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, kept_of, specs_of, values_of
from mlagen.spec.kernel import CallShape, KernelSpec
from mlagen.spec.mla_support import output_dtype
from mlagen.values import reject, require_whole_number, several, shown, texts

# What a call names, and the key_fields that hold it in one family or another.
FILTERS = {
    "dtype": ("query_dtype", "dtype"),
    "kv_lora_rank": ("kv_lora_rank", "head_dim_vo"),
    "head_dim": ("head_dim", "head_dim_vo"),
    "page_size": ("page_size",),
}

# Of these the usual is meant where nothing is said.
USUAL = {"lookup": ["paged"], "values": ["shared"], "mask": ["causal"]}


def select_specs(
    archs: Iterable[Arch],
    *,
    families: Iterable[str] | None = None,
    heads: int | Iterable[int] | None = None,
    kv_heads: int | Iterable[int] | None = None,
    q_len: int | Iterable[int] | None = None,
    wanted: dict[str, str | int | Iterable[str | int]],
) -> list[KernelSpec]:
    """Return the kernels that the arguments of :func:`mlagen.prewarm` leave, each once.

    Raises
    ------
    ArgumentError
        If a family, an ingredient or a value does not exist, or a number is below 1.
    """
    calls = _calls(heads, kv_heads, q_len)
    chosen = tuple(FAMILIES) if families is None else tuple(texts(families, "family"))
    specs: dict[KernelSpec, None] = {}
    for arch in archs:
        listed = specs_of(arch, chosen)
        if not listed:  # families of other architectures alone
            continue
        known = {name for spec in listed for name in spec.key_fields()} - {"arch"}
        kept = {name: list(values) for name, values in USUAL.items() if name in known}
        kept |= {name: [] for label in wanted for name in _key_fields_of(label, known)}
        for label, values in wanted.items():
            for name in _key_fields_of(label, known):
                kept[name] += [_text(name, value) for value in several(values, label)]
        if "head_dim_vo" in kept and "head_dim_vo" not in wanted:
            for label in {"kv_lora_rank", "head_dim"} - set(wanted):
                kept["head_dim_vo"] += values_of(listed, label)  # dims that are not said: all
        for spec in kept_of(listed, kept):
            if not calls or any(spec.serves(call) for call in calls):
                specs[spec] = None
    return list(specs)


def _text(ingredient: str, value: str | int) -> str:
    """Return a value as the ingredient names it: a combining kernel knows what is written."""
    if not isinstance(value, str):
        value = str(require_whole_number(value, ingredient))
    packed = {str(dtype): str(output_dtype(dtype)) for dtype in (DType.E4M3, DType.FP8_PER_TOKEN)}
    return packed.get(str(value), str(value)) if ingredient == "dtype" else str(value)


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
    """Return the shapes of the calls; none if they are not said."""
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
    return [require_whole_number(value, argument, least=1) for value in several(values, argument)]
