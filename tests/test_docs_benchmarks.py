"""Committed benchmark results, and the page and plots that are generated from them."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
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

DOCS = Path(__file__).resolve().parents[1] / "docs"
# The page of each suite, and the folder of its results.
PAGES = {
    "full": (DOCS / "benchmarks.md", "results"),
    "v4": (DOCS / "benchmarks-v4.md", "results/v4"),
    "gqa": (DOCS / "benchmarks-gqa.md", "results/gqa"),
}
RESULTS = {
    suite: {
        path.stem: read_document("results", path) for path in sorted((DOCS / folder).glob("*.json"))
    }
    for suite, (_, folder) in PAGES.items()
}


def render_page(page: str, suite: str) -> str:
    """Return the page with a section for each GPU below its first one, the method."""
    head = "\n## ".join(page.split("\n## ")[:2]).rstrip()
    sections = [_section(suite, name, document) for name, document in RESULTS[suite].items()]
    if not sections:
        sections = ["## Results\n\nNo GPU has measured this suite yet.\n"]
    return "\n".join([f"{head}\n", *sections])


def short_name(document: Mapping[str, Any]) -> str:
    """Return ``H100`` of ``NVIDIA H100 80GB HBM3``."""
    return str(document["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]


def _section(suite: str, name: str, document: Mapping[str, Any]) -> str:
    gpu, ceilings = document["gpu"], document["ceilings"]
    fp8 = ceilings["fp8_tflop_s"]
    versions = document["baselines"]
    baselines = ", ".join(f"{key} ({versions[key]})" for key in _measured_baselines(document))
    facts = (
        f"[{gpu}]({PAGES[suite][1]}/{name}.json), "
        f"{document['power_limit_w']:.0f} W, {document['max_sm_mhz']:.0f} MHz, "
        f"driver {document['driver']}, torch {document['torch']}, NVRTC {document['nvrtc']}, "
        f"mlagen {document['mlagen']} at `{document['commit']}`; "
    )
    rates = (
        f"measured {ceilings['read_gb_s']:.0f} GB/s, "
        f"{ceilings['bf16_tflop_s']:.0f} TFLOP/s in bf16"
        f"{'' if fp8 is None else f', {fp8:.0f} TFLOP/s in e4m3'}."
    )
    image = f"![Share of the roofline bound](images/benchmark-{name}.svg)\n"
    by_case: dict[str, dict[str, Any]] = {}
    for row in document["cases"]:
        by_case.setdefault(row["case"], {})[row["mode"]] = row
    return "\n".join(
        [
            f"## {short_name(document)}\n",
            *([image] if suite == "full" else []),
            f"- {facts}{rates}\n- Baselines: {baselines}.",
            *(f"- {line[0].upper()}{line[1:]}." for line in summaries_of(document["cases"])),
            _by_baseline(document),
            *_not_measured(suite, by_case),
            "",
            *table([_cells(document, modes) for modes in by_case.values()]),
        ]
    )


def _not_measured(suite: str, measured: Mapping[str, Any]) -> list[str]:
    """Return a line about the cases of the suite that a document, of an earlier commit, lacks."""
    missing = len(select_cases(suite=suite)) - len(measured)
    return [f"- {missing} cases of the suite were not measured at that commit."] if missing else []


def _measured_baselines(document: Mapping[str, Any]) -> list[str]:
    """Return the baselines that serve a case."""
    served = {name for row in document["cases"] for name in row["baselines"]}
    return [name for name in document["baselines"] if name in served]


def _measured_modes(document: Mapping[str, Any]) -> list[str]:
    """Return the states of the GPU that a document has."""
    return [mode for mode in MODES if any(row["mode"] == mode for row in document["cases"])]


def _by_baseline(document: Mapping[str, Any]) -> str:
    """Return the ratios to each baseline, fresh and, if measured, sustained."""
    parts = []
    states = [mode for mode in _measured_modes(document) if mode in ("fresh", "sustained")]
    for name in _measured_baselines(document):
        means = []
        for mode in states:
            rows = [row for row in document["cases"] if row["mode"] == mode]
            times = [(row["baselines"].get(name), row["mlagen"]) for row in rows]
            ratios = [his["us"] / ours["us"] for his, ours in times if his and his["is_right"]]
            means.append(f"{geometric_mean(ratios):.2f} (least {min(ratios):.2f})")
        parts.append(f"{name} {' and '.join(means)}")
    return f"- Geometric mean ratio to each, {' and '.join(states)}: {', '.join(parts)}."


def _cells(document: Mapping[str, Any], modes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    row = modes["fresh"]
    ours, best = row["mlagen"], row["best_baseline"]
    baselines = {name: row["baselines"].get(name) for name in _measured_baselines(document)}
    ratios = {mode: modes.get(mode, {}).get("ratio") for mode in _measured_modes(document)}
    return {
        "case": row["case"],
        "mlagen, us": f"{ours['us']:.1f}",
        **{name: _time(each, is_best=name == best) for name, each in baselines.items()},
        **{f"ratio, {mode}": _ratio(ratio) for mode, ratio in ratios.items()},
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


RENEW = "renew with: MLAGEN_ACCEPT=1 python3 -m pytest tests/test_docs_benchmarks.py"

# A figure of speed: a time, a rate or a ratio.
_SPEED = re.compile(
    r"\d\s*(us|µs|GB/s|TB/s|TFLOP|tokens/s|x faster|x slower|% (faster|slower|less))\b"
)

results = pytest.mark.parametrize(
    ("suite", "document"),
    [(suite, document) for suite, documents in RESULTS.items() for document in documents.values()],
    ids=[f"{suite}, {name}" for suite, documents in RESULTS.items() for name in documents],
)


@pytest.mark.parametrize("suite", PAGES)
def test_the_page_is_the_output_of_its_generator(suite: str) -> None:
    """Sections of GPUs are generated from the results, and a page fits 180 lines."""
    page, _ = PAGES[suite]
    expected = render_page(page.read_text(encoding="utf-8"), suite)
    if os.environ.get("MLAGEN_ACCEPT"):
        page.write_text(expected, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == expected, RENEW
    assert len(expected.splitlines()) <= 180


@results
def test_results_are_of_a_clean_run(suite: str, document: Mapping[str, Any]) -> None:
    """A committed document has each case in its states, right; layer may be of some cases."""
    rows = {(row["case"], row["mode"]) for row in document["cases"]}
    labels = {label for label, _ in rows}
    assert labels <= {case.label for case in select_cases(suite=suite)}
    modes = _measured_modes(document)
    assert modes[0] == "fresh"
    assert rows >= {(label, mode) for label in labels for mode in modes if mode != "layer"}
    assert all(row["mlagen"]["is_right"] for row in document["cases"])
    assert re.fullmatch(r"[0-9a-f]{12}", document["commit"])
    assert None not in document.values()


@pytest.mark.parametrize("suite", [suite for suite in PAGES if RESULTS[suite]])
def test_one_gpu_has_every_case(suite: str) -> None:
    """No case of a suite with results is without one."""
    documents = RESULTS[suite].values()
    labels = {row["case"] for document in documents for row in document["cases"]}
    assert labels == {case.label for case in select_cases(suite=suite)}


@pytest.mark.parametrize("name", RESULTS["full"])
def test_the_plot_shows_the_results(name: str) -> None:
    """The SVG has each case of the quick suite with its shares, its ratio and its baseline."""
    path = DOCS / "images" / f"benchmark-{name}.svg"
    document = choose_rows(RESULTS["full"][name], select_cases(suite="quick"), ["fresh"])
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
    assert _SPEED.findall((DOCS.parent / page).read_text(encoding="utf-8")) == []
