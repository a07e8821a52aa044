"""Tables, texts and JSON of the commands."""

from __future__ import annotations

import pytest

from cache_tools.output import report
from cache_tools.output.report import (
    age_text,
    count_text,
    kernel_columns,
    print_facts,
    print_table,
    size_text,
    time_text,
)
from mlagen.spec.arch import parse_arch
from mlagen.spec.families import specs_of
from tests.fixture_types import Patch

SIZES = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 54_624: "53 KiB", 5 << 20: "5.0 MiB"}
TIMES = {0.0184: "18 us", 0.2: "200 us", 1.5: "1.5 ms", 612.3: "612 ms", 1432.0: "1.4 s"}
AGES = {-5: "0 s ago", 59: "59 s ago", 60: "1 min ago", 7200: "2 h ago", 34_560_000: "400 d ago"}


def test_quantities_are_human_readable() -> None:
    """The unit keeps a quantity short, a future time counts as now, and 1 has the singular."""
    assert {size: size_text(size) for size in SIZES} == SIZES
    assert {ms: time_text(ms) for ms in TIMES} == TIMES
    assert {age_s: age_text(age_s) for age_s in AGES} == AGES
    assert [count_text(count, "kernel") for count in (1, 2)] == ["1 kernel", "2 kernels"]
    assert count_text(0, "entry", "entries") == "0 entries"


def test_a_table_is_aligned_and_has_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are right-aligned, text left; None is an empty cell, or no column."""
    rows = [{"name": "a", "size": 1, "note": None}, {"name": "bcd", "size": 200, "note": "x"}]
    print_table([{**row, "variant": "", "error": None} for row in rows])
    assert capsys.readouterr().out == "name  size  note\na        1\nbcd    200  x\n"


def test_a_narrow_terminal_folds_names_not_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    """A table wider than the terminal breaks column names at underscores."""
    monkeypatch.setattr(report, "line_width", lambda: 20)
    print_table([{"key": "0a1b2c3d", "kv_lora_rank": 512, "page_size": 64}])
    assert capsys.readouterr().out.splitlines() == [
        "           kv_",
        "         lora_ page_",
        "key       rank  size",
        "0a1b2c3d   512    64",
    ]


def test_a_long_fact_is_wrapped_at_blanks(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    """A value that is wider than the terminal breaks at blanks, not at hyphens."""
    monkeypatch.setattr(report, "line_width", lambda: 29)
    print_facts({"why": "the cache folder is a read-only layer of another user"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("why  the cache")
    assert all(line.startswith("     ") for line in lines[1:])
    assert " ".join(" ".join(lines).split()) == (
        "why the cache folder is a read-only layer of another user"
    )


def test_facts_are_printed_unchanged_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines to a file or a pipe are not wrapped; markup and emoji codes are printed verbatim."""
    path = "/x/[bold]x[/bold]/:smile:" + "/long" * 100
    print_facts({"path": path})
    assert capsys.readouterr().out == f"path  {path}\n"


@pytest.mark.parametrize("family", ["mla_sm80", "gqa_sm80", "combine"])
def test_the_columns_of_a_kernel_are_unique(family: str) -> None:
    """No two supported kernels of an architecture have equal columns."""
    specs = specs_of(parse_arch("sm_90a"), [family])
    rows = {tuple(kernel_columns(family, spec.key_fields()).values()) for spec in specs}
    assert len(rows) == len(specs)
