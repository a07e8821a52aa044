"""Committed benchmark results, and the page and plots that are generated from them."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path

import pytest

from cache_tools.benchmark.choices import MODES
from cache_tools.benchmark.comparison import choose_rows
from cache_tools.benchmark.plot import write_plot
from cache_tools.benchmark.selection import select_cases
from tests.doc_benchmarks import RESULTS, render_page, short_name

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
RENEW = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_benchmarks.py"

# A figure of speed: a time, a rate or a ratio.
_SPEED = re.compile(
    r"\d\s*(us|µs|GB/s|TB/s|TFLOP|tokens/s|x faster|x slower|% (faster|slower|less))\b"
)

results = pytest.mark.parametrize("name", RESULTS)


def test_the_page_is_the_output_of_its_generator() -> None:
    """Sections of docs/benchmarks.md are generated from docs/results, and it fits 150 lines."""
    written = PAGE.read_text(encoding="utf-8")
    expected = render_page(written)
    if os.environ.get("MLAGEN_ACCEPT"):
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected, RENEW
    assert len(expected.splitlines()) <= 150
    links = [f"[{short_name(each)}](results/{name}.json)" for name, each in RESULTS.items()]
    assert ", ".join(links) in expected


@results
def test_results_are_of_a_clean_run(name: str) -> None:
    """A committed document has every case in every mode, right, and tells what ran."""
    document = RESULTS[name]

    rows = {(row["case"], row["mode"]) for row in document["cases"]}
    assert rows == {(case.label, mode) for case in select_cases(suite="full") for mode in MODES}
    assert all(row["mlagen"]["is_right"] for row in document["cases"])
    assert re.fullmatch(r"[0-9a-f]{12}", document["commit"])
    assert None not in document.values()


@results
def test_the_plot_shows_the_results(name: str) -> None:
    """The SVG has each case of the quick suite with its shares, its ratio and its baseline."""
    path = ROOT / "docs" / "images" / f"benchmark-{name}.svg"
    document = choose_rows(RESULTS[name], select_cases(suite="quick"), ["fresh"])
    if os.environ.get("MLAGEN_ACCEPT") and find_spec("matplotlib") is not None:
        write_plot(document, path)

    texts = {"".join(each.itertext()).strip() for each in ET.parse(path).iter()}  # noqa: S314

    for row in document["cases"]:
        best = row["baselines"].get(row["best_baseline"])
        share = f"{row['mlagen']['roofline_share']:.2f}"
        expected = {row["case"], share}
        if best is not None:
            expected = {row["case"], f"{share}, {row['ratio']:.2f}x"}
            expected.add(f"{best['roofline_share']:.2f}, {row['best_baseline']}")
        assert expected <= texts, RENEW


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md"])
def test_figures_of_speed_stand_on_the_benchmark_page_alone(page: str) -> None:
    """A figure that is not generated from the results would go stale."""
    assert _SPEED.findall((ROOT / page).read_text(encoding="utf-8")) == []
