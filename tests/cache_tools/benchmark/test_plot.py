"""Plot of a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mlagen
from cache_tools.benchmark.outcomes import Outcome
from cache_tools.benchmark.plot import draw, require_plot, write_plot
from cache_tools.benchmark.run import run_cases
from cache_tools.benchmark.selection import case_of
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra `bench`")


def document() -> dict[str, Any]:
    """Return three cases: right for both, wrong for mlagen, failed for the baseline."""
    cases = [case_of("mla"), case_of("mla", heads=16), case_of("mla", dtype="e4m3")]
    ours = dict(zip(cases, (RIGHT, WRONG, RIGHT), strict=True))
    theirs = dict(zip(cases, (Outcome(us=1500.0, error=1e-3), RIGHT, FAILED), strict=True))
    machine = FakeMachine(ours.__getitem__, theirs.__getitem__)
    return run_cases(cases, machine, lambda _: None)


@pytest.mark.usefixtures("_matplotlib")
def test_a_file_is_written(tmp_path: Path) -> None:
    """A PNG of some size; an SVG with text, no date and no random ids, equal for equal results."""
    png, *svg = (tmp_path / name for name in ("bars.png", "one.svg", "other.svg"))
    for path in (png, *svg):
        write_plot(document(), path)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert png.stat().st_size > 10_000
    assert svg[0].read_bytes() == svg[1].read_bytes()
    assert ">mla bf16, 128 x 4096, 16 heads</text>" in svg[0].read_text()


@pytest.mark.usefixtures("_matplotlib")
def test_every_right_result_is_a_labelled_bar() -> None:
    """Shares of the bound stand at the bars, with the best baseline and the ratio to it."""
    from matplotlib.patches import Rectangle

    (axes,) = draw(document()).axes
    bars = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    texts = ["0.18, 1.50x", "0.12, fa3", "0.15, fa3", "0.09"]
    legend = ["mlagen, and its speed over the baseline", "best baseline"]
    assert [round(float(bar.get_width()), 2) for bar in bars] == [0.18, 0.12, 0.15, 0.09]
    assert [text.get_text() for text in axes.texts] == texts
    assert axes.get_legend_handles_labels()[1] == legend


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("bars.pdf", "a name that ends in .svg or .png"),
        ("none/bars.svg", "a file in a writable folder"),
        (".svg/", "a name that ends in .svg or .png"),
    ],
)
def test_a_plot_that_cannot_be_written_is_rejected(name: str, rule: str, tmp_path: Path) -> None:
    """It is rejected before the measurements."""
    with pytest.raises(mlagen.ArgumentError, match=f"plot: expected {rule}, got "):
        require_plot(tmp_path / name)
