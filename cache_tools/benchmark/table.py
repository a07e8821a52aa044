"""Table and messages of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..report import console, print_table
from .roofline import Ceilings
from .run import ceilings_text


def print_results(document: dict[str, Any]) -> None:
    """Print the GPU, its ceilings, and a row per case."""
    ceilings = ceilings_text(Ceilings(**document["ceilings"]))
    baseline = "" if document["flashinfer"] is None else f", FlashInfer {document['flashinfer']}"
    text = f"{document['gpu']}, torch {document['torch']}{baseline}: {ceilings}\n"
    console().print(text, soft_wrap=True)
    print_table([_row(case) for case in document["cases"]])


def problems_of(document: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each missing or wrong result, of either library."""
    for case in document["cases"]:
        for library in ("mlagen", "flashinfer"):
            outcome = case[library]
            if outcome is None or outcome["is_right"]:
                continue
            problem = outcome["problem"]
            if problem is None:
                bound, error = case["error_bound"], outcome["error"]
                problem = f"relative error: expected {bound:g} or less, got {error:.1e}"
            yield f"{library}: {case['case']}: {problem}"


def all_right(document: dict[str, Any]) -> bool:
    """Whether every result of mlagen is within its bound; FlashInfer's do not count."""
    return all(case["mlagen"]["is_right"] for case in document["cases"])


def _row(case: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = case["mlagen"], case["flashinfer"]
    row = {
        "case": case["case"],
        "us": _rounded(ours["us"], 1),
        "tflop_s": _rounded(ours["tflop_s"], 1),
        "gb_s": _rounded(ours["gb_s"]),
        "floor_us": _rounded(case["floor_us"], 1),
        "of_floor": _rounded(ours["share_of_floor"], 2),
        "error": "failed" if ours["error"] is None else f"{ours['error']:.1e}{_mark(ours)}",
    }
    if theirs is not None:
        us = theirs["us"]
        row["flashinfer_us"] = "failed" if us is None else f"{us:.1f}{_mark(theirs)}"
        row["ratio"] = _rounded(case["ratio"], 2)
    return row


def _mark(outcome: dict[str, Any]) -> str:
    return "" if outcome["is_right"] else " WRONG"


def _rounded(value: float | None, digits: int | None = None) -> float | None:
    return None if value is None else round(value, digits)
