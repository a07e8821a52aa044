"""Kernel selection of a prewarm: by models, by kernel texts, or by spec fields."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from mlagen.models.config import find_model
from mlagen.models.kernels import ServingOptions, model_specs, serving_text
from mlagen.prewarming.machine import parse_archs
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, batch_invariant, require_families, select_specs
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.text import parse_spec
from mlagen.values import (
    as_list,
    as_str_list,
    reject,
    require_choice,
    require_text,
    require_whole_number,
    shown,
)

_T = TypeVar("_T")
Counts: TypeAlias = int | Iterable[int] | None
Wanted: TypeAlias = str | int | Iterable[str | int]
Kernels: TypeAlias = str | KernelSpec | Iterable[str | KernelSpec]

# Dtypes as servers and frameworks spell them.
_DTYPE_NAMES = {"fp8": "e4m3", "fp8_e4m3": "e4m3", "bfloat16": "bf16"}
_DTYPE_NAMES |= {"float16": "fp16", "half": "fp16"}
# Fields that can be combined with models; the model determines the others.
MODEL_OPTIONS = ("dtype", "kv_dtype", "page_size", "lookup")


def selected_specs(
    archs: str | Iterable[str],
    *,
    models: str | Iterable[str] | None = None,
    tp: Counts = None,
    dcp: Counts = None,
    kernels: Kernels | None = None,
    families: Iterable[str] | None = None,
    heads: Counts = None,
    kv_heads: Counts = None,
    q_len: Counts = None,
    wanted: Mapping[str, Wanted],
    on_left_out: Callable[[str], None] = lambda _: None,
) -> list[KernelSpec]:
    """Return the kernels that the arguments of :func:`mlagen.prewarm` select, without duplicates.

    ``on_left_out`` receives a sentence for each part of a model without a kernel. Raises
    ArgumentError if an argument breaks its rule, names an unknown value, or conflicts with another;
    UnsupportedError if ``native`` finds no supported GPU.
    """
    specs: dict[KernelSpec, None] = {}
    shape = {"heads": heads, "kv_heads": kv_heads, "q_len": q_len}
    if kernels is not None:
        specs |= {
            k if isinstance(k, KernelSpec) else parse_spec(require_text(k, "kernel")): None
            for k in as_list(kernels, "kernels")
        }
    if models is not None:
        _reject({"heads": heads, "kv_heads": kv_heads}, "beside models, which define it")
        _reject({k: v for k, v in wanted.items() if k not in MODEL_OPTIONS}, "beside models")
        names = as_str_list(models, "model")
        use = _use(tp, dcp, q_len, wanted)
        known = _families(families)
        found = [find_model(name.strip()) for name in names]
        for arch in parse_archs(archs):
            made = (spec for model in found for spec in model_specs(arch, model, use, on_left_out))
            specs |= dict.fromkeys(_of_mode(spec for spec in made if spec.family in known))
        return list(specs)
    _reject({"tp": tp, "dcp": dcp}, "without models")
    if kernels is not None:
        _reject({"families": families, **shape, **wanted}, "beside kernels, without models")
        return list(specs)
    named = {label: _renamed(label, values) for label, values in wanted.items()}
    return _of_mode(select_specs(parse_archs(archs), families=families, wanted=named, **shape))


def _of_mode(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Return the kernels of calls that leave it to the settings whether they are invariant."""
    has_mode = current_settings().batch_invariant
    return batch_invariant(specs) if has_mode else list(dict.fromkeys(specs))


def serving_texts(
    models: str | Iterable[str],
    *,
    tp: Counts = None,
    dcp: Counts = None,
    q_len: Counts = None,
    **wanted: Wanted,
) -> list[str]:
    """Return how :func:`selected_specs` takes each model to be served, defaults included.

    Raises ArgumentError if an argument breaks its rule, or names an unknown value.
    """
    use = _use(tp, dcp, q_len, wanted)
    return [serving_text(find_model(name.strip()), use) for name in as_str_list(models, "model")]


def _reject(arguments: Mapping[str, object], where: str) -> None:
    for name, value in arguments.items():
        if value is not None:
            reject(name, f"none {where}", shown(value))


def _families(families: Iterable[str] | None) -> set[str]:
    chosen = list(FAMILIES) if families is None else as_str_list(families, "family")
    require_families(chosen)
    return set(chosen)


def _use(tp: Counts, dcp: Counts, q_len: Counts, wanted: Mapping[str, Wanted]) -> ServingOptions:
    return ServingOptions(
        tp=_values("tp", tp, _count) or (1,),
        dcp=_values("dcp", dcp, _count) or (1,),
        q_lens=_values("q_len", q_len, _count) or (1,),
        page_sizes=_values("page_size", wanted.get("page_size"), _count),
        dtypes=_values("dtype", wanted.get("dtype"), _dtype),
        kv_dtypes=_values("kv_dtype", wanted.get("kv_dtype"), _dtype),
        lookups=_values("lookup", wanted.get("lookup"), _lookup),
    )


def _values(name: str, values: object, check: Callable[[object, str], _T]) -> list[_T] | None:
    """Return the checked values of an argument that selects how a model is served."""
    if values is None:
        return None
    found = as_list(_renamed(name, values), name)
    if not found:
        reject(name, "one or more beside models", "none")
    return [check(value, name) for value in found]


def _count(value: object, name: str) -> int:
    return require_whole_number(value, name, min_value=1)


def _dtype(value: object, name: str) -> DType:
    return DType(require_choice(value, name, [str(dtype) for dtype in DType]))


def _lookup(value: object, name: str) -> str:
    return require_choice(value, name, ("paged", "sparse", "two_pools"))


def _renamed(label: str, values: Any) -> Any:
    """Return the dtypes of a label as mlagen spells them, and other values as they are."""
    if not label.endswith("dtype"):
        return values
    return [
        _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value
        for value in as_list(values, label)
    ]
