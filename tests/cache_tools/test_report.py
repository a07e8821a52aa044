"""Tables, texts and JSON of the commands."""

from __future__ import annotations

import json

import pytest

from cache_tools.output import report
from cache_tools.output.report import (
    age_text,
    count_text,
    kernel_columns,
    kernel_text,
    print_facts,
    print_json,
    print_table,
    resource_columns,
    size_text,
    time_text,
)
from mlagen.spec.arch import parse_arch
from mlagen.spec.families import specs_of


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (54_624, "53 KiB"),
        (5 << 20, "5.0 MiB"),
        (150_121_000_000, "139.8 GiB"),
    ],
)
def test_sizes_are_human_readable(size: int, text: str) -> None:
    """The unit of a size keeps it short."""
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0.0184, "18 us"), (0.2, "200 us"), (1.5, "1.5 ms"), (612.3, "612 ms"), (1432.0, "1.4 s")],
)
def test_times_are_human_readable(ms: float, text: str) -> None:
    """The unit of a duration keeps it short."""
    assert time_text(ms) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s ago"),
        (59, "59 s ago"),
        (60, "1 min ago"),
        (7200, "2 h ago"),
        (86_400 * 400, "400 d ago"),
    ],
)
def test_ages_are_human_readable(seconds: float, text: str) -> None:
    """The unit of an age keeps it short, and a future time counts as now."""
    assert age_text(seconds) == text


def test_counts_agree_with_their_noun() -> None:
    """A count of 1 has the singular."""
    texts = [count_text(1, "kernel"), count_text(2, "kernel"), count_text(0, "entry", "entries")]

    assert texts == ["1 kernel", "2 kernels", "0 entries"]


def test_a_table_is_aligned_and_has_no_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers are right-aligned, text left; None is an empty cell, or no column."""
    rows = [{"name": "a", "size": 1, "note": None}, {"name": "bcd", "size": 200, "note": "x"}]
    print_table([{**row, "variant": "", "error": None} for row in rows])

    assert capsys.readouterr().out == "name  size  note\na        1\nbcd    200  x\n"


def test_a_narrow_terminal_folds_names_not_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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


def test_a_long_row_stays_one_line_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines to a file or a pipe are not wrapped."""
    print_facts({"path": "/a/very" + "/long" * 100 + "/path"})

    assert len(capsys.readouterr().out.splitlines()) == 1


def test_text_is_printed_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    """Markup and emoji codes are printed verbatim."""
    print_facts({"path": "/x/[bold]x[/bold]/:smile:"})

    assert capsys.readouterr().out == "path  /x/[bold]x[/bold]/:smile:\n"


def test_a_document_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The printed document parses to the same data."""
    document = {"path": "/häuser", "entries": [{"ms": 1.5, "error": None}]}

    print_json(document)

    assert json.loads(capsys.readouterr().out) == document


@pytest.mark.parametrize("family", ["mla_sm80", "gqa_sm80", "combine"])
def test_the_columns_of_a_kernel_are_unique(family: str) -> None:
    """No two supported kernels of an architecture have equal columns."""
    specs = specs_of(parse_arch("sm_90a"), [family])

    rows = {tuple(kernel_columns(family, spec.key_fields()).values()) for spec in specs}

    assert len(rows) == len(specs)


def test_a_kernel_on_one_line() -> None:
    """The line has the family, the target and the non-default fields."""
    (spec,) = [
        spec
        for spec in specs_of(parse_arch("sm_80"), ["combine"], dtype=["fp16"])
        if spec.key_fields()["head_dim_vo"] == "256"
    ]

    text = kernel_text("combine", spec.key_fields())

    assert text == "combine sm_80 fp16 dims 256"


def test_resources_are_those_of_the_kernel() -> None:
    """Spills add stores and loads, shared memory adds static and dynamic."""
    kernel = {
        "symbol": "mla_sm80",
        "registers": 200,
        "stack_bytes": 0,
        "spill_store_bytes": 8,
        "spill_load_bytes": 12,
        "static_shared_bytes": 64,
    }

    resources = resource_columns([kernel], 1000)

    assert resources == {"registers": 200, "spill_bytes": 20, "shared_bytes": 1064}
