"""Committed benchmark results, and the page and plots that are generated from them."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from cache_tools.benchmark.comparison import choose_rows, read_document
from cache_tools.benchmark.plot import write_plot
from cache_tools.benchmark.selection import select_cases
from cache_tools.benchmark.suites import MODES
from cache_tools.benchmark.table import summaries_of
from tests.doc_text import table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = {
    path.stem: read_document("results", path)
    for path in sorted((ROOT / "docs" / "results").glob("*.json"))
}


def render_page(page: str) -> str:
    """Return the page with a section for each GPU below its first two."""
    head = page.partition(f"## {short_name(next(iter(RESULTS.values())))}\n")[0]
    return head + "\n".join(_section(name, document) for name, document in RESULTS.items())


def short_name(document: Mapping[str, Any]) -> str:
    """Return ``H100`` of ``NVIDIA H100 80GB HBM3``."""
    return str(document["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]


def _section(name: str, document: Mapping[str, Any]) -> str:
    gpu, ceilings = document["gpu"], document["ceilings"]
    baselines = ", ".join(f"{key} ({version})" for key, version in document["baselines"].items())
    facts = (
        f"{gpu}, {document['power_limit_w']:.0f} W, {document['max_sm_mhz']:.0f} MHz, "
        f"driver {document['driver']}, torch {document['torch']}, NVRTC {document['nvrtc']}, "
        f"mlagen {document['mlagen']} at `{document['commit']}`; "
    )
    rates = (
        f"measured {ceilings['read_gb_s']:.0f} GB/s, "
        f"{ceilings['bf16_tflop_s']:.0f} TFLOP/s in bf16, "
        f"{ceilings['fp8_tflop_s']:.0f} TFLOP/s in e4m3."
    )
    image = f"images/benchmark-{name}.svg"
    by_case: dict[str, dict[str, Any]] = {}
    for row in document["cases"]:
        by_case.setdefault(row["case"], {})[row["mode"]] = row
    return "\n".join(
        [
            f"## {short_name(document)}\n",
            f"![Share of the roofline bound]({image})\n",
            f"- {facts}{rates}\n- Baselines: {baselines}.",
            *(f"- {line[0].upper()}{line[1:]}." for line in summaries_of(document["cases"])),
            _by_baseline(document),
            *_not_measured(by_case),
            "",
            *table([_cells(modes, list(document["baselines"])) for modes in by_case.values()]),
        ]
    )


def _not_measured(measured: Mapping[str, Any]) -> list[str]:
    """Return a line about the cases of the suite that a document, of an earlier commit, lacks."""
    missing = len(select_cases(suite="full")) - len(measured)
    return [f"- {missing} cases of the suite were not measured at that commit."] if missing else []


def _by_baseline(document: Mapping[str, Any]) -> str:
    """Return the ratios to each baseline, fresh and sustained."""
    parts = []
    for name in document["baselines"]:
        means = []
        for mode in ("fresh", "sustained"):
            rows = [row for row in document["cases"] if row["mode"] == mode]
            times = [(row["baselines"].get(name), row["mlagen"]) for row in rows]
            ratios = [his["us"] / ours["us"] for his, ours in times if his and his["is_right"]]
            means.append(f"{geometric_mean(ratios):.2f} (least {min(ratios):.2f})")
        parts.append(f"{name} {' and '.join(means)}")
    return f"- Geometric mean ratio to each, fresh and sustained: {', '.join(parts)}."


def _cells(modes: Mapping[str, Mapping[str, Any]], baselines: Sequence[str]) -> dict[str, str]:
    row = modes["fresh"]
    ours, best = row["mlagen"], row["best_baseline"]
    times = {name: _time(row["baselines"].get(name), is_best=name == best) for name in baselines}
    return {
        "case": row["case"],
        "mlagen, us": f"{ours['us']:.1f}",
        **times,
        **{f"ratio, {mode}": _ratio(modes[mode]["ratio"]) for mode in MODES},
        "share": f"{ours['roofline_share']:.2f}",
        "error": f"{ours['error']:.1e}",
        "its error": "-" if best is None else f"{row['baselines'][best]['error']:.1e}",
    }


def _time(outcome: Mapping[str, Any] | None, *, is_best: bool) -> str:
    if outcome is None or not outcome["is_right"]:
        return "-"
    return f"**{outcome['us']:.1f}**" if is_best else f"{outcome['us']:.1f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


PAGE = ROOT / "docs" / "benchmarks.md"
RENEW = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_benchmarks.py"

# A figure of speed: a time, a rate or a ratio.
_SPEED = re.compile(
    r"\d\s*(us|µs|GB/s|TB/s|TFLOP|tokens/s|x faster|x slower|% (faster|slower|less))\b"
)

results = pytest.mark.parametrize("name", RESULTS)


def test_the_page_is_the_output_of_its_generator() -> None:
    """Sections of docs/benchmarks.md are generated from docs/results, and it fits 180 lines."""
    written = PAGE.read_text(encoding="utf-8")
    expected = render_page(written)
    if os.environ.get("MLAGEN_ACCEPT"):
        PAGE.write_text(expected, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == expected, RENEW
    assert len(expected.splitlines()) <= 180
    links = [f"[{short_name(each)}](results/{name}.json)" for name, each in RESULTS.items()]
    assert ", ".join(links) in expected


@results
def test_results_are_of_a_clean_run(name: str) -> None:
    """A committed document has cases of the suite in every mode, right, and tells what ran."""
    document = RESULTS[name]
    rows = {(row["case"], row["mode"]) for row in document["cases"]}
    labels = {label for label, _ in rows}
    assert labels <= {case.label for case in select_cases(suite="full")}
    assert rows == {(label, mode) for label in labels for mode in MODES}
    assert all(row["mlagen"]["is_right"] for row in document["cases"])
    assert re.fullmatch(r"[0-9a-f]{12}", document["commit"])
    assert None not in document.values()


def test_one_gpu_has_every_case() -> None:
    """No case of the suite is without a result."""
    labels = {row["case"] for document in RESULTS.values() for row in document["cases"]}
    assert labels == {case.label for case in select_cases(suite="full")}


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
