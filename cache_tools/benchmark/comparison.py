"""Earlier results: reading them, choosing rows of them, and what became slower since."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from mlagen.errors import ArgumentError
from mlagen.paths import is_regular, read_named
from mlagen.values import reject, shown

from .cases import Case
from .outcomes import BENCH

_SCALARS = {str: "a text", int: "an integer", float: "a finite number", bool: "a boolean"}
_NUMBERS = ("us", "tflop_s", "gb_s", "roofline_share", "error")


@dataclass(frozen=True, kw_only=True)
class Change:
    """A case of earlier results, and its time now; None if there is no right result."""

    case: str
    mode: str
    before_us: float
    us: float | None

    @property
    def change(self) -> float | None:
        """Relative change of the time, above 0 if it is slower."""
        return None if self.us is None else self.us / self.before_us - 1

    def verdict(self, tolerance: float) -> str:
        """Return ``ok``, ``slower``, ``faster`` or ``missing``."""
        change = self.change
        if change is None:
            return "missing"
        if abs(change) <= tolerance:
            return "ok"
        return "slower" if change > 0 else "faster"

    def __str__(self) -> str:
        now = "no right result" if self.us is None else f"{self.us:.1f} us"
        return f"{self.case}, {self.mode}: {now}, {self.before_us:.1f} us before"


def parse_tolerance(text: str) -> float:
    """Return a percentage such as ``3%`` as a fraction.

    Raises ArgumentError if it is none, or negative.
    """
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not text.endswith("%") or not math.isfinite(value) or value < 0:
        raise ArgumentError(f"tolerance: expected a percentage such as 3%, got {text}")
    return value


def read_document(argument: str, path: Path) -> dict[str, Any]:
    """Return what ``mlagen bench --json`` wrote.

    Raises ArgumentError if the file is no such document; the message has the place in it.
    """
    if not is_regular(path):
        got = path if os.path.lexists(path) else f"none: {path}"
        raise ArgumentError(f"{argument}: expected a file of mlagen bench --json, got {got}")
    try:
        document = json.loads(read_named(path))
    except (OSError, ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.keys() != BENCH.keys():
        raise ArgumentError(f"{argument}: expected results of mlagen bench --json, got {path}")
    where = f"{argument}: {path}"
    _require(document, BENCH, where)
    for number, case in enumerate(document["cases"]):
        _require_results(case, f"{where}.cases[{number}]")
    return document


def _require(value: Any, kind: Any, where: str) -> None:
    """Require a type of the document, with finite numbers."""
    if isinstance(kind, list) or (isinstance(kind, dict) and ... in kind):
        if not isinstance(value, type(kind)):
            reject(where, "a list" if isinstance(kind, list) else "a map", shown(value))
        (item_kind,) = kind if isinstance(kind, list) else kind.values()
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _require(item, item_kind, f"{where}[{key}]")
    elif isinstance(kind, dict):
        if not isinstance(value, dict) or value.keys() != kind.keys():
            reject(where, f"fields {next(iter(kind))} to {list(kind)[-1]}", shown(value))
        for name, field_kind in kind.items():
            _require(value[name], field_kind, f"{where}.{name}")
    elif not _is_scalar(value, kind):
        plain, *null = get_args(kind) or (kind,)
        reject(where, f"{_SCALARS[plain]}{' or null' if null else ''}", shown(value))


def _is_scalar(value: object, kind: Any) -> bool:
    of = (kind | int) if kind in {float, float | None} else kind
    if not isinstance(value, of) or (isinstance(value, bool) and kind is not bool):
        return False
    try:
        return not isinstance(value, (int, float)) or math.isfinite(value)
    except OverflowError:  # an int that no float can hold
        return False


def _require_results(case: Mapping[str, Any], where: str) -> None:
    """Require results as they are measured: above 0, and with a problem where they are missing."""
    best = case["best_baseline"]
    if best is not None and best not in case["baselines"]:
        reject(f"{where}.best_baseline", "one of `baselines`", shown(best))
    if case["ratio"] is not None and case["ratio"] <= 0:
        reject(f"{where}.ratio", "more than 0", case["ratio"])
    results = {f"baselines[{name}]": each for name, each in case["baselines"].items()}
    for library, result in {"mlagen": case["mlagen"], **results}.items():
        if result["us"] is not None and result["us"] <= 0:
            reject(f"{where}.{library}.us", "more than 0", result["us"])
        missing = [name for name in _NUMBERS if result[name] is None]
        if missing and (result["is_right"] or result["problem"] is None):
            place = f"{where}.{library}.{missing[0]}"
            reject(place, "a number of a result without a problem", None)


def choose_rows(
    document: Mapping[str, Any], cases: Sequence[Case] | None, modes: Sequence[str] | None
) -> dict[str, Any]:
    """Return the document with the rows of ``cases`` and ``modes`` only; None chooses all.

    Raises ArgumentError if none is left.
    """
    labels = None if cases is None else {case.label for case in cases}
    rows = [
        row
        for row in document["cases"]
        if (labels is None or row["case"] in labels) and (modes is None or row["mode"] in modes)
    ]
    if not rows:
        raise ArgumentError("from-json: expected results of the chosen cases and modes, got none")
    return {**document, "cases": rows}


def changes_since(earlier: Mapping[str, Any], document: Mapping[str, Any]) -> list[Change]:
    """Return the change of each right result of ``earlier`` whose case ``document`` has too.

    Raises ArgumentError if the documents are of two GPUs, or have no case in common.
    """
    if earlier["gpu"] != document["gpu"]:
        raise ArgumentError(
            f"baseline: expected results of {document['gpu']}, got those of {earlier['gpu']}"
        )
    rows = {(row["case"], row["mode"]): row["mlagen"] for row in document["cases"]}
    changes = []
    for row in earlier["cases"]:
        now = rows.get((row["case"], row["mode"]))
        if now is None or not row["mlagen"]["is_right"]:
            continue
        us = now["us"] if now["is_right"] else None
        before_us = row["mlagen"]["us"]
        changes.append(Change(case=row["case"], mode=row["mode"], before_us=before_us, us=us))
    if not changes:
        raise ArgumentError("baseline: expected a case and mode in common, got none")
    return changes
