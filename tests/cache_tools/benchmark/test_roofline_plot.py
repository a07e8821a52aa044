"""Roofline plot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlagen
from cache_tools.benchmark.roofline_plot import draw, require_plot, write_plot
from cache_tools.benchmark.run import run_cases
from cache_tools.benchmark.selection import case_of
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra `bench`")


def document() -> dict[str, Any]:
    """Return three cases: right for both, wrong for mlagen, failed for FlashInfer; one in e4m3."""
    cases = [case_of("mla"), case_of("mla", heads=16), case_of("mla", dtype="e4m3")]
    ours = dict(zip(cases, (RIGHT, WRONG, RIGHT), strict=True))
    theirs = dict(zip(cases, (RIGHT, RIGHT, FAILED), strict=True))
    machine = FakeMachine(ours.__getitem__, theirs.__getitem__)
    return run_cases(cases, machine, lambda _: None)


@pytest.mark.usefixtures("_matplotlib")
def test_a_png_is_written(tmp_path: Path) -> None:
    """The file is a PNG of some size."""
    path = tmp_path / "roofline.png"

    write_plot(document(), path)

    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(content) > 10_000


@pytest.mark.usefixtures("_matplotlib")
def test_every_right_result_is_a_labelled_point() -> None:
    """Ceilings are lines, right results are numbered points, others are not drawn."""
    (axes,) = draw(document()).axes

    assert axes.get_legend_handles_labels()[1] == [
        "reads, 4000 GB/s",
        "bf16 GEMM, 800 TFLOP/s",
        "e4m3 GEMM, 1600 TFLOP/s",
        "1  mla bf16, 128 x 4096, 128 heads",
        "1f  mla bf16, 128 x 4096, 128 heads, FlashInfer",
        "2f  mla bf16, 128 x 4096, 16 heads, FlashInfer",
        "3  mla e4m3, 128 x 4096, 128 heads",
    ]
    assert [text.get_text() for text in axes.texts] == ["1", "1f", "2f", "3"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")


@pytest.mark.usefixtures("_matplotlib")
def test_points_lie_where_the_numbers_say() -> None:
    """Points are at (intensity, TFLOP/s); the lines meet at their ridge."""
    (axes,) = draw(document()).axes
    reads, bf16, _, point, *_ = axes.lines

    assert np.asarray(point.get_data()) == pytest.approx(np.array([[228.30164], [146.02889]]))
    intensities, tflop_s = np.asarray(reads.get_data())
    assert tflop_s == pytest.approx(4 * intensities)
    assert np.asarray(bf16.get_data())[:, 0].tolist() == [200.0, 800.0]


def test_without_matplotlib_the_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the install command."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(mlagen.UnsupportedError) as caught:
        require_plot(tmp_path / "roofline.png")

    assert str(caught.value) == (
        "plot: expected matplotlib to be installed, got none; run: pip install matplotlib"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("roofline.pdf", "a name that ends in .png"),
        ("nowhere/roofline.png", "a file in a writable folder"),
        ("folder.png", "a file in a writable folder"),
    ],
    ids=["another format", "no such folder", "a folder"],
)
def test_a_file_that_cannot_be_written_is_rejected(
    name: str, expected: str, tmp_path: Path
) -> None:
    """An unwritable file is rejected before any measurement."""
    (tmp_path / "folder.png").mkdir()

    with pytest.raises(mlagen.ArgumentError) as caught:
        require_plot(tmp_path / name)

    assert str(caught.value) == f"plot: expected {expected}, got {tmp_path / name}"
