"""Case selection: a suite, or every combination of the given values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.spec.dtype import EXTRA_ROW_FORMATS, ROW_FORMATS, DType
from mlagen.spec.gqa import variant as gqa
from mlagen.spec.mla import variant as mla_support
from mlagen.values import reject

from .cases import (
    FAMILIES,
    KV_LORA_RANK,
    QK_ROPE_HEAD_DIM,
    SPARSE_BLOCKS,
    SWA_TOKENS,
    VLLM_BLOCK_SIZES,
    Case,
)
from .suites import SUITES

_DTYPES = {
    "dtype": (DType.BF16, DType.FP16, DType.E4M3),
    "kv_dtype": (
        DType.BF16,
        DType.FP16,
        DType.E4M3,
        *(dtype for dtype, row in ROW_FORMATS.items() if not row.holds_queries),
        DType.INT8,
        DType.NVFP4,
        DType.INT8_PER_TOKEN_HEAD,
        DType.FP8_PER_TOKEN_HEAD,
    ),
}

# Default values of a case; the default dtype of the cache is that of the query.
_SHARED: dict[str, Any] = {
    "batch": 128,
    "seq_len": 4096,
    "q_len": 1,
    "page_size": 64,
    "dtype": "bf16",
    "kv_dtype": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mla": {
        **_SHARED,
        "heads": 128,
        "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
        "top_k": 0,
        "compress_ratio": 4,
    },
    "gqa": {
        **_SHARED,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 128,
        "head_dim_vo": 0,
        "top_k": 0,
        "sparse_block": 1,
        "window_left": -1,
        "soft_cap": 0,
    },
}


def select_cases(
    families: Iterable[str] | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    *,
    is_ragged: bool = False,
    suite: str = "quick",
    pattern: str | None = None,
) -> list[Case]:
    """Return the cases to measure, each once.

    Without ``axes`` and ``is_ragged`` they are those of a suite, of both families by default; or
    else every combination of the values by parameter, by default of MLA. ``pattern`` is a regular
    expression that their labels match somewhere. Raises ArgumentError if a family or dtype is
    unknown, values are inconsistent, or no label matches; UnsupportedError if no kernel covers a
    case.
    """
    cases = _combinations(families, axes or {}, is_ragged=is_ragged, suite=suite)
    if pattern is None:
        return cases
    try:
        chosen = [case for case in cases if re.search(pattern, case.label)]
    except re.error as error:
        raise ArgumentError(f"filter: expected a regular expression, got {pattern}") from error
    if not chosen:
        raise ArgumentError(
            f"filter: expected a regular expression that matches a name such as "
            f"'{cases[0].label}', got {pattern}"
        )
    return chosen


def _combinations(
    families: Iterable[str] | None,
    axes: Mapping[str, Sequence[Any]],
    *,
    is_ragged: bool,
    suite: str,
) -> list[Case]:
    names = None if families is None else list(families)
    for name in names or ():
        if name not in FAMILIES:
            raise ArgumentError(f"family: expected {' or '.join(FAMILIES)}, got {name}")
    if not axes and not is_ragged:
        return [
            case
            for name, rows in SUITES[suite].items()
            if name in (names or FAMILIES)
            for axes_of_row in rows
            for case in _product(name, axes_of_row)
        ]
    names = names or ["mla"]
    known = {axis for name in names for axis in DEFAULTS[name]}
    for axis in axes:
        if axis not in known:
            (needed,) = [name for name in FAMILIES if axis in DEFAULTS[name]]
            raise ArgumentError(
                f"{axis}: expected family {needed} with it, got family {', '.join(names)}"
            )
    cases: dict[Case, None] = {}
    for name in names:
        own = {axis: (*values,) for axis, values in axes.items() if axis in DEFAULTS[name]}
        cases |= dict.fromkeys(_product(name, {**own, "is_ragged": is_ragged}))
    return list(cases)


def _product(family: str, axes: Mapping[str, Any]) -> Iterator[Case]:
    """Yield the case of each combination of the values, of which those in tuples are several."""
    several = [values if isinstance(values, tuple) else (values,) for values in axes.values()]
    for values in product(*several):
        yield case_of(family, **dict(zip(axes, values, strict=True)))


def case_of(family: str, *, is_ragged: bool = False, **given: Any) -> Case:
    """Return a checked case of the ``given`` values, with defaults for the rest.

    Raises ArgumentError if a dtype is unknown, or values are inconsistent; UnsupportedError if no
    kernel covers the case.
    """
    facts = {**DEFAULTS[family], **given}
    kv_heads = facts.pop("kv_heads", 1)
    head_dim = facts.pop("head_dim", None)
    head_dim_vo = facts.pop("head_dim_vo", 0) or head_dim
    rope_dim = facts.pop("qk_rope_head_dim", 0)
    dtype = _dtype("dtype", facts.pop("dtype"))
    kv_name = facts.pop("kv_dtype")
    kv_dtype = dtype if kv_name is None else _dtype("kv_dtype", kv_name)
    ratio = facts.pop("compress_ratio", 0)
    if kv_dtype.extra_row is not None:
        rope_dim, facts["window_left"] = 0, SWA_TOKENS - 1
        facts["compress_ratio"] = _compress_ratio(ratio, facts)
    elif "compress_ratio" in given:
        names = ", ".join(map(str, EXTRA_ROW_FORMATS))
        raise ArgumentError(f"compress_ratio: expected kv_dtype of {names}, got {kv_dtype}")
    case = Case(
        family=family,
        kv_heads=kv_heads,
        head_dim_qk=head_dim or KV_LORA_RANK + rope_dim,
        head_dim_vo=head_dim_vo or KV_LORA_RANK,
        dtype=dtype,
        kv_dtype=kv_dtype,
        is_ragged=is_ragged,
        **facts,
    )
    if case.heads % case.kv_heads:
        raise ArgumentError(
            f"heads: expected a multiple of {case.kv_heads} (kv_heads), got {case.heads}"
        )
    if case.seq_len < case.q_len:
        raise ArgumentError(f"seq_len: expected {case.q_len} (q_len) or more, got {case.seq_len}")
    if case.has_two_pools:
        _require_lists(case)
    elif case.top_k > case.seq_len or (case.top_k and case.is_ragged):
        raise ArgumentError(
            f"top_k: expected at most {case.seq_len} (seq_len) and equal lengths, got {case.top_k}"
            f"{' with ragged ones' if case.is_ragged else ''}"
        )
    if case.family == "gqa" and (case.top_k or case.sparse_block != 1):
        _require_sparse_gqa(case)
    _require_supported(case)
    return case


def _compress_ratio(ratio: int, facts: Mapping[str, Any]) -> int:
    """Return the ratio of the second pool, or 0 if no token of it is listed."""
    if ratio not in VLLM_BLOCK_SIZES:
        raise ArgumentError(
            f"compress_ratio: expected one of {', '.join(map(str, VLLM_BLOCK_SIZES))}, got {ratio}"
        )
    return ratio if facts["top_k"] else 0


def _require_lists(case: Case) -> None:
    if case.top_k > case.extra_tokens:
        rule = f"at most {case.extra_tokens} (seq_len over compress_ratio)"
        raise ArgumentError(f"top_k: expected {rule}, got {case.top_k}")
    if case.seq_len < SWA_TOKENS:
        raise ArgumentError(f"seq_len: expected {SWA_TOKENS} or more, got {case.seq_len}")


def _require_sparse_gqa(case: Case) -> None:
    """Require what MSA has, where an index names a block, or QSA, where it names a token."""
    block = case.sparse_block
    if block not in SPARSE_BLOCKS:
        reject("sparse_block", " or ".join(map(str, SPARSE_BLOCKS)), block)
    dims = {"head_dim_vo": case.head_dim_qk, "window_left": -1, "soft_cap": 0}
    for name, none in {**dims, **({"page_size": block} if block > 1 else {})}.items():
        if getattr(case, name) != none:
            reject(name, f"{none} with top_k", getattr(case, name))
    position = case.seq_len - (case.q_len if block > 1 else 1)
    limit = (position // block + 1) * block
    if case.top_k % block or not 0 < case.top_k <= limit:
        rule = f"a multiple of {block} (sparse_block) from {block} to {limit}"
        reject("top_k", rule, case.top_k)
    if block > 1 and case.kv_dtype is DType.NVFP4:
        raise UnsupportedError(f"no decode kernel over blocks of {block} tokens in {case.kv_dtype}")


def _dtype(argument: str, name: str) -> DType:
    known = {str(dtype): dtype for dtype in _DTYPES[argument]}
    if name not in known:
        raise ArgumentError(f"{argument}: expected one of {', '.join(known)}, got {name}")
    return known[name]


def _require_supported(case: Case) -> None:
    query, kv = case.dtype, case.kv_dtype
    if case.family == "mla":
        lookup = "sparse" if case.top_k else "paged"
        mla_support.require_supported(
            mla_support.MlaVariant(
                query_dtype=query,
                kv_dtype=kv,
                qk_rope_head_dim=case.qk_rope_head_dim,
                lookup="two_pools" if case.has_two_pools else lookup,
            )
        )
    else:
        gqa.require_supported(
            gqa.GqaVariant(
                query_dtype=query,
                kv_dtype=kv,
                out_dtype=query,
                head_dim=case.head_dim_qk,
                head_dim_vo=case.head_dim_vo if case.has_value_dims else 0,
                sparse_block=case.sparse_block if case.is_sparse_gqa else 0,
            )
        )
