"""Tables and messages of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from statistics import geometric_mean
from typing import Any

import click

from ..output.report import count_text, print_facts, print_table
from .comparison import Change
from .outcomes import Ceilings, ceilings_text

# Two times that differ by less are equal: runs of one kernel differ as much.
_NOISE = 0.01


def print_results(document: Mapping[str, Any]) -> None:
    """Print what was measured with what, a row per case and mode, and a summary per mode."""
    modes = list(dict.fromkeys(case["mode"] for case in document["cases"]))
    print_facts(_header(document, modes))
    click.echo()
    print_table([_row(case, has_modes=len(modes) > 1) for case in document["cases"]])
    if summaries := summaries_of(document["cases"]):
        click.echo("\n" + "\n".join(summaries))


def summaries_of(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each mode: in how many cases mlagen is faster than the best baseline."""
    ratios: dict[str, list[float]] = {}
    for case in cases:
        if case["ratio"] is not None:
            ratios.setdefault(case["mode"], []).append(case["ratio"])
    lines = []
    for mode, found in ratios.items():
        faster = sum(ratio > 1 + _NOISE for ratio in found)
        slower = sum(ratio < 1 - _NOISE for ratio in found)
        lines.append(
            f"{mode}: of {count_text(len(found), 'case')} with a baseline, faster than the best in "
            f"{faster}, within {_NOISE:.0%} in {len(found) - faster - slower}, slower in {slower}; "
            f"geometric mean of the ratios {geometric_mean(found):.2f}, least {min(found):.2f}"
        )
    return lines


def print_changes(changes: list[Change], tolerance: float) -> None:
    """Print a row for each case of the earlier results, with what became of its time."""
    rows = [
        {
            "case": change.case,
            "mode": change.mode,
            "before_us": _rounded(change.before_us, 1),
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


def _header(document: Mapping[str, Any], modes: Sequence[str]) -> dict[str, str]:
    watts, mhz = document["power_limit_w"], document["max_sm_mhz"]
    gpu = [
        document["gpu"],
        *([] if watts is None else [f"{watts:.0f} W"]),
        *([] if mhz is None else [f"{mhz:.0f} MHz"]),
        *_named("driver ", document["driver"]),
    ]
    commit = "".join(_named(" at ", document["commit"]))
    software = [f"torch {document['torch']}", *_named("NVRTC ", document["nvrtc"])]
    baselines = [f"{name} ({version})" for name, version in document["baselines"].items()]
    return {
        "GPU": ", ".join(gpu),
        "mlagen": ", ".join([f"{document['mlagen']}{commit}", *software]),
        **({"baselines": ", ".join(baselines)} if baselines else {}),
        "ceilings": ceilings_text(Ceilings(**document["ceilings"])),
        **({"mode": modes[0]} if len(modes) == 1 else {}),
    }


def _named(prefix: str, value: str | None) -> list[str]:
    return [] if value is None else [f"{prefix}{value}"]


def _row(case: Mapping[str, Any], *, has_modes: bool) -> dict[str, Any]:
    ours, best = case["mlagen"], case["best_baseline"]
    mark = "" if ours["is_right"] else " WRONG"
    best_us = None if best is None else case["baselines"][best]["us"]
    return {
        "case": case["case"],
        "mode": case["mode"] if has_modes else "",
        "us": _rounded(ours["us"], 1),
        "tflop_s": _rounded(ours["tflop_s"], 1),
        "gb_s": _rounded(ours["gb_s"]),
        "roofline_us": _rounded(case["roofline_us"], 1),
        "share": _rounded(ours["roofline_share"], 2),
        "error": "failed" if ours["error"] is None else f"{ours['error']:.1e}{mark}",
        "best_baseline": best,
        "best_us": _rounded(best_us, 1),
        "ratio": _rounded(case["ratio"], 2),
    }


def _rounded(value: float | None, digits: int = 0) -> Decimal | None:
    """Return a number that prints with as many digits as the others of its column."""
    return None if value is None else Decimal(f"{value:.{digits}f}")
