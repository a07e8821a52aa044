"""Roofline plot of a benchmark: measured TFLOP/s over arithmetic intensity."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.paths import is_regular

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# By library: marker, whether it is filled, and the side of its number.
_STYLES = {"mlagen": ("o", True, "left"), "flashinfer": ("s", False, "right")}

_CEILINGS = (("bf16_tflop_s", "bf16", "-"), ("fp8_tflop_s", "e4m3", "--"))


def require_plot(path: Path) -> None:
    """Reject a plot that cannot be written, before the measurements.

    Raises
    ------
    ArgumentError
        If ``path`` is no PNG file in a writable folder.
    UnsupportedError
        If matplotlib is not installed.
    """
    if path.suffix.lower() != ".png":
        raise ArgumentError(f"plot: expected a name that ends in .png, got {path}")
    is_taken = os.path.lexists(path) and not is_regular(path)
    if is_taken or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ArgumentError(f"plot: expected a file in a writable folder, got {path}")
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "plot: expected matplotlib to be installed, got none; run: pip install matplotlib"
        )


def write_plot(document: dict[str, Any], path: Path) -> None:
    """Write the roofline of a benchmark as a PNG file."""
    draw(document).savefig(path, dpi=150)


def draw(document: dict[str, Any]) -> Figure:
    """Return the roofline of a benchmark.

    Every right result is a point with the number of its case in the legend; wrong or missing
    results are not drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.add_subplot()
    _draw_ceilings(axes, document)
    for index, case in enumerate(document["cases"]):
        _draw_case(axes, index, case)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xlabel("arithmetic intensity, FLOP / byte")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{document['gpu']}, mlagen {document['mlagen']}")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small", frameon=False)
    return figure


def _draw_ceilings(axes: Axes, document: dict[str, Any]) -> None:
    ceilings = document["ceilings"]
    rates = [ceilings[name] for name, _, _ in _CEILINGS if ceilings[name] is not None]
    intensities = [case["flop_per_byte"] for case in document["cases"]]
    tflop_s_per_intensity = ceilings["read_gb_s"] / 1e3
    ridge = max(rates) / tflop_s_per_intensity
    start, end = min([*intensities, ridge]) / 2, max([*intensities, ridge]) * 2
    axes.plot(
        [start, ridge],
        [start * tflop_s_per_intensity, max(rates)],
        color="black",
        label=f"reads, {ceilings['read_gb_s']:.0f} GB/s",
    )
    for name, dtype, style in _CEILINGS:
        rate = ceilings[name]
        if rate is not None:
            axes.plot(
                [rate / tflop_s_per_intensity, end],
                [rate, rate],
                color="black",
                linestyle=style,
                label=f"{dtype} GEMM, {rate:.0f} TFLOP/s",
            )


def _draw_case(axes: Axes, index: int, case: dict[str, Any]) -> None:
    color = f"C{index % 10}"
    for library, (marker, is_filled, side) in _STYLES.items():
        outcome = case[library]
        if outcome is None or not outcome["is_right"]:
            continue
        number, text = f"{index + 1}", case["case"]
        if library != "mlagen":
            number, text = f"{number}f", f"{text}, FlashInfer"
        intensity, tflop_s = case["flop_per_byte"], outcome["tflop_s"]
        axes.plot(
            [intensity],
            [tflop_s],
            marker=marker,
            color=color,
            markerfacecolor=color if is_filled else "none",
            linestyle="none",
            label=f"{number}  {text}",
        )
        axes.annotate(
            number,
            (intensity, tflop_s),
            (6 if side == "left" else -6, 0),
            textcoords="offset points",
            fontsize="small",
            horizontalalignment=side,
            verticalalignment="center",
        )
