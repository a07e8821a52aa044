"""Case selection: the default cases, or every combination of the given values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from mlagen.errors import ArgumentError
from mlagen.spec import gqa, mla_support
from mlagen.spec.dtype import DType

from .cases import FAMILIES, KV_LORA_RANK, QK_ROPE_HEAD_DIM, Case

DTYPES = {str(dtype): dtype for dtype in (DType.BF16, DType.FP16, DType.E4M3)}

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
    "mla": {**_SHARED, "heads": 128},
    "gqa": {**_SHARED, "heads": 64, "kv_heads": 8, "head_dim": 128},
}

# DeepSeek-V3 with tensor parallelism 1, 2 and 8; one long request, which needs split-KV; requests
# too short to fill the GPU. Then a large batch and one long request of GQA, with a BF16 and an FP8
# KV cache.
_DEFAULT_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("mla", {}),
    ("mla", {"heads": 64}),
    ("mla", {"heads": 16}),
    ("mla", {"batch": 1, "seq_len": 65536}),
    ("mla", {"batch": 16, "seq_len": 1024}),
    ("gqa", {}),
    ("gqa", {"batch": 1, "seq_len": 131072}),
    ("gqa", {"kv_dtype": "e4m3"}),
    ("gqa", {"batch": 1, "seq_len": 131072, "kv_dtype": "e4m3"}),
)


def select_cases(
    families: Iterable[str] | None = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    *,
    is_ragged: bool = False,
) -> list[Case]:
    """Return the cases to measure, each once.

    Parameters
    ----------
    families : iterable of str
        ``mla``, ``gqa`` or both; if None both for the default cases, and ``mla`` with ``axes``.
    axes : mapping of str to sequence
        Values by parameter, such as ``heads``: every combination is a case.
        Without axes and ``is_ragged``, the default cases are returned.
    is_ragged : bool
        Whether the requests differ in length.

    Raises
    ------
    ArgumentError
        If a family or dtype is unknown, or values are inconsistent.
    UnsupportedError
        If no kernel covers a case.
    """
    names = None if families is None else list(families)
    for name in names or ():
        if name not in FAMILIES:
            raise ArgumentError(f"family: expected {' or '.join(FAMILIES)}, got {name}")
    if not axes and not is_ragged:
        return [
            case_of(name, **facts) for name, facts in _DEFAULT_CASES if name in (names or FAMILIES)
        ]
    names, axes = names or ["mla"], axes or {}
    known = {axis for name in names for axis in DEFAULTS[name]}
    for axis in axes:
        if axis not in known:
            raise ArgumentError(
                f"{axis}: expected family gqa with it, got family {', '.join(names)}"
            )
    cases = []
    for name in names:
        own = {axis: values for axis, values in axes.items() if axis in DEFAULTS[name]}
        for values in product(*own.values()):
            facts = dict(zip(own, values, strict=True))
            cases.append(case_of(name, is_ragged=is_ragged, **facts))
    return list(dict.fromkeys(cases))


def case_of(family: str, *, is_ragged: bool = False, **given: Any) -> Case:
    """Return a checked case of the ``given`` values, with defaults for the rest.

    Raises
    ------
    ArgumentError
        If a dtype is unknown, or values are inconsistent.
    UnsupportedError
        If no kernel covers the case.
    """
    facts = {**DEFAULTS[family], **given}
    kv_heads = facts.pop("kv_heads", 1)
    head_dim = facts.pop("head_dim", None)
    dtype = _dtype("dtype", facts.pop("dtype"))
    kv_name = facts.pop("kv_dtype")
    case = Case(
        family=family,
        kv_heads=kv_heads,
        head_dim_qk=head_dim or KV_LORA_RANK + QK_ROPE_HEAD_DIM,
        head_dim_vo=head_dim or KV_LORA_RANK,
        dtype=dtype,
        kv_dtype=dtype if kv_name is None else _dtype("kv_dtype", kv_name),
        is_ragged=is_ragged,
        **facts,
    )
    if case.heads % case.kv_heads:
        raise ArgumentError(
            f"heads: expected a multiple of {case.kv_heads} (kv_heads), got {case.heads}"
        )
    if case.seq_len < case.q_len:
        raise ArgumentError(f"seq_len: expected {case.q_len} (q_len) or more, got {case.seq_len}")
    _require_supported(case)
    return case


def _dtype(argument: str, name: str) -> DType:
    if name not in DTYPES:
        raise ArgumentError(f"{argument}: expected one of {', '.join(DTYPES)}, got {name}")
    return DTYPES[name]


def _require_supported(case: Case) -> None:
    query, kv = case.dtype, case.kv_dtype
    if case.family == "mla":
        mla_support.require_supported(mla_support.MlaVariant(query_dtype=query, kv_dtype=kv))
    else:
        gqa.require_supported(
            gqa.GqaVariant(
                query_dtype=query, kv_dtype=kv, out_dtype=query, head_dim=case.head_dim_qk
            )
        )
