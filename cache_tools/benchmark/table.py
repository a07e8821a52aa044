"""Tables and messages of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..report import console, print_table
from .comparison import Change
from .roofline import Ceilings
from .run import ceilings_text


def print_results(document: Mapping[str, Any]) -> None:
    """Print the GPU, its ceilings, and a row per case and mode."""
    ceilings = ceilings_text(Ceilings(**document["ceilings"]))
    baselines = "".join(f", {name} ({ver})" for name, ver in document["baselines"].items())
    text = f"{document['gpu']}, torch {document['torch']}{baselines}: {ceilings}\n"
    console().print(text, soft_wrap=True)
    has_modes = len({case["mode"] for case in document["cases"]}) > 1
    print_table([_row(case, has_modes=has_modes) for case in document["cases"]])


def print_changes(changes: list[Change], tolerance: float) -> None:
    """Print a row for each case of the earlier results, with what became of its time."""
    rows = [
        {
            "case": change.case,
            "mode": change.mode,
            "before_us": round(change.before_us, 1),
            "us": _rounded(change.us, 1),
            "change": "missing" if change.change is None else f"{change.change:+.1%}",
            "verdict": change.verdict(tolerance),
        }
        for change in changes
    ]
    print_table(rows)


def problems_of(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each missing or wrong result, of any library."""
    for case in document["cases"]:
        for library, outcome in {"mlagen": case["mlagen"], **case["baselines"]}.items():
            if outcome["is_right"]:
                continue
            problem = outcome["problem"]
            if problem is None:
                bound, error = case["error_bound"], outcome["error"]
                problem = f"relative error: expected {bound:g} or less, got {error:.1e}"
            yield f"{library}: {case['case']}: {problem}"


def all_right(document: Mapping[str, Any]) -> bool:
    """Whether every result of mlagen is within its bound; those of baselines do not count."""
    return all(case["mlagen"]["is_right"] for case in document["cases"])


def _row(case: Mapping[str, Any], *, has_modes: bool) -> dict[str, Any]:
    ours, best = case["mlagen"], case["best_baseline"]
    best_us = None if best is None else case["baselines"][best]["us"]
    return {
        "case": case["case"],
        "mode": case["mode"] if has_modes else "",
        "us": _rounded(ours["us"], 1),
        "tflop_s": _rounded(ours["tflop_s"], 1),
        "gb_s": _rounded(ours["gb_s"]),
        "roofline_us": _rounded(case["roofline_us"], 1),
        "share": _rounded(ours["roofline_share"], 2),
        "error": "failed" if ours["error"] is None else f"{ours['error']:.1e}{_mark(ours)}",
        "best_baseline": best,
        "best_us": _rounded(best_us, 1),
        "ratio": _rounded(case["ratio"], 2),
    }


def _mark(outcome: Mapping[str, Any]) -> str:
    return "" if outcome["is_right"] else " WRONG"


def _rounded(value: float | None, digits: int | None = None) -> float | None:
    return None if value is None else round(value, digits)
