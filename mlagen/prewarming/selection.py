"""Which kernels the arguments of a prewarm name: those of models, of texts, or of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from mlagen.models.config import find_model
from mlagen.models.kernels import Use, model_specs
from mlagen.prewarming.gpus import archs_of
from mlagen.spec.dtype import DType
from mlagen.spec.families import FAMILIES, require_families
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.selection import select_specs
from mlagen.spec.text import parse_spec
from mlagen.values import (
    reject,
    require_choice,
    require_text,
    require_whole_number,
    several,
    shown,
    texts,
)

Counts: TypeAlias = int | Iterable[int] | None
Wanted: TypeAlias = str | int | Iterable[str | int]
Kernels: TypeAlias = str | KernelSpec | Iterable[str | KernelSpec]

# What may be said beside a model; all else the model says.
_BESIDE_MODELS = ("dtype", "kv_dtype", "page_size", "lookup")


def selected_specs(
    archs: str | Iterable[str],
    *,
    models: str | Iterable[str] | None = None,
    tp: Counts = None,
    kernels: Kernels | None = None,
    families: Iterable[str] | None = None,
    heads: Counts = None,
    kv_heads: Counts = None,
    q_len: Counts = None,
    wanted: Mapping[str, Wanted],
    on_left_out: Callable[[str], None] = lambda _: None,
) -> list[KernelSpec]:
    """Return the kernels that the arguments of :func:`mlagen.prewarm` name, each once.

    ``on_left_out`` gets a sentence for each part of a model that no kernel serves.

    Raises
    ------
    ArgumentError
        If an argument breaks its rule, names what does not exist, or goes with no other.
    UnsupportedError
        If ``native`` finds no GPU to serve.
    """
    specs: dict[KernelSpec, None] = {}
    shape = {"heads": heads, "kv_heads": kv_heads, "q_len": q_len}
    if kernels is not None:
        specs |= {
            k if isinstance(k, KernelSpec) else parse_spec(require_text(k, "kernel")): None
            for k in several(kernels, "kernels")
        }
    if models is not None:
        _reject({"heads": heads, "kv_heads": kv_heads}, "beside models, which say it")
        _reject({k: v for k, v in wanted.items() if k not in _BESIDE_MODELS}, "beside models")
        names = texts(models, "model")
        use = _use(1 if tp is None else tp, 1 if q_len is None else q_len, wanted)
        known = _families(families)
        found = [find_model(name.strip()) for name in names]
        for arch in archs_of(archs):
            made = (spec for model in found for spec in model_specs(arch, model, use, on_left_out))
            specs |= {spec: None for spec in made if spec.family in known}
        return list(specs)
    _reject({"tp": tp}, "without models")
    if kernels is not None:
        _reject({"families": families, **shape, **wanted}, "beside kernels, without models")
        return list(specs)
    return select_specs(archs_of(archs), families=families, wanted=dict(wanted), **shape)


def _reject(said: Mapping[str, object], where: str) -> None:
    for name, value in said.items():
        if value is not None:
            reject(name, f"none {where}", shown(value))


def _families(families: Iterable[str] | None) -> set[str]:
    chosen = list(FAMILIES) if families is None else texts(families, "family")
    require_families(chosen)
    return set(chosen)


def _use(tp: Counts, q_len: Counts, wanted: Mapping[str, Wanted]) -> Use:
    page_sizes = wanted.get("page_size")
    lookups = wanted.get("lookup")
    return Use(
        tp=_counts("tp", tp),
        q_lens=_counts("q_len", q_len),
        page_sizes=None if page_sizes is None else _counts("page_size", page_sizes),
        dtypes=_dtypes("dtype", wanted),
        kv_dtypes=_dtypes("kv_dtype", wanted),
        lookups=None if lookups is None else _lookups(lookups),
    )


def _counts(name: str, values: object) -> list[int]:
    return [require_whole_number(value, name, least=1) for value in _some(values, name)]


def _dtypes(name: str, wanted: Mapping[str, Wanted]) -> list[DType] | None:
    if name not in wanted:
        return None
    known = [str(dtype) for dtype in DType]
    values = _some(wanted[name], name)
    return [DType(require_choice(value, name, known)) for value in values]


def _lookups(values: object) -> list[str]:
    known = ("paged", "sparse")
    return [require_choice(value, "lookup", known) for value in _some(values, "lookup")]


def _some(values: object, name: str) -> list[object]:
    """Return the values of an argument that says how a model is served."""
    said = list(several(values, name))
    if not said:
        reject(name, "one or more beside models", "none")
    return said
