"""Plot of a benchmark: share of the roofline bound, beside the best baseline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.paths import is_regular

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".svg", ".png")

_MLAGEN, _BASELINE = "#1f5fa8", "#c2c9d1"
_BAR, _ROW_INCHES = 0.38, 0.36

# Text stays text, so that it can be searched, without formulas, which a $ of a file would begin;
# equal results give equal files.
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mlagen",
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
}


def require_plot(path: Path) -> None:
    """Reject a plot that cannot be written, before the measurements.

    Raises ArgumentError if ``path`` is no SVG or PNG file in a writable folder; UnsupportedError if
    matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise ArgumentError(f"plot: expected a name that ends in .svg or .png, got {path}")
    is_taken = os.path.lexists(path) and not is_regular(path)
    if is_taken or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"plot: expected a file in a writable folder, got {path}")
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "plot: expected matplotlib to be installed, got none; run: pip install matplotlib"
        )


def write_plot(document: Mapping[str, Any], path: Path) -> None:
    """Write the plot of a benchmark as an SVG or PNG file."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        draw(document).savefig(path, dpi=150, metadata=metadata)


def draw(document: Mapping[str, Any]) -> Figure:
    """Return the plot of a benchmark.

    A case is a bar of mlagen with its speed over the best baseline, and below it a bar of that
    baseline with its name; wrong or missing results have no bar.
    """
    from matplotlib.figure import Figure

    rows = document["cases"]
    figure = Figure(figsize=(9, 1.1 + _ROW_INCHES * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    _draw_bars(axes, rows)
    labels = [row["case"] if len(modes) == 1 else f"{row['case']} ({row['mode']})" for row in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize="small")
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("share of the roofline bound")
    of_modes = f", {modes[0]}" if len(modes) == 1 else ""
    axes.set_title(f"{document['gpu']}, mlagen {document['mlagen']}{of_modes}")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=2, frameon=False, fontsize="small")
    return figure


def _draw_bars(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    legend = {_MLAGEN: "mlagen, and its speed over the baseline", _BASELINE: "best baseline"}
    for place, row in enumerate(rows):
        ratio = "" if row["ratio"] is None else f", {row['ratio']:.2f}x"
        bars = [(_MLAGEN, -_BAR / 2, row["mlagen"], ratio)]
        best = row["best_baseline"]
        if best is not None:
            bars.append((_BASELINE, _BAR / 2, row["baselines"][best], f", {best}"))
        for color, offset, outcome, note in bars:
            if not outcome["is_right"]:
                continue
            share = outcome["roofline_share"]
            axes.barh(place + offset, share, _BAR, color=color, label=legend.pop(color, None))
            axes.annotate(
                f"{share:.2f}{note}",
                (share, place + offset),
                (3, 0),
                textcoords="offset points",
                fontsize="x-small",
                verticalalignment="center",
            )
