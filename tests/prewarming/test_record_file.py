"""Record files: their kernels, the kernels for other architectures, and invalid lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from mlagen import engine
from mlagen.errors import ArgumentError
from mlagen.prewarming.record_file import read_record
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec
from tests.kernels import COMBINE, SM_80, gqa_sm80, mla_sm80, mla_sm90


def line_of(spec: KernelSpec) -> str:
    """Return a line of a record."""
    record = {"kernel": str(spec), "key": "0" * 64, "toolchain": "nvrtc-13.5.37", "found": "hit"}
    return json.dumps(record) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the path of a record that does not exist yet."""
    return tmp_path / "record.jsonl"


def test_each_kernel_of_a_record_is_selected_once(log: Path) -> None:
    """Several processes may write the same file; empty lines are skipped."""
    log.write_text(f"{line_of(COMBINE)}{line_of(gqa_sm80())}\n{line_of(COMBINE)}")

    assert read_record(log) == [COMBINE, gqa_sm80()]


def test_on_another_architecture_the_same_calls_are_served(log: Path) -> None:
    """With ``archs``, the record selects the kernels that the same calls take there."""
    log.write_text(line_of(mla_sm90()) + line_of(gqa_sm80()))

    specs = read_record(log, archs="sm_80")

    assert mla_sm80(arch=SM_80) in specs
    assert gqa_sm80(arch=SM_80) in specs
    assert COMBINE in specs
    assert {spec.arch for spec in specs} == {SM_80}


@pytest.mark.parametrize("end", [1, 30, -1])
def test_an_incomplete_last_line_is_skipped(
    end: int, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ended while writing it; the warning has the line number."""
    torn = line_of(gqa_sm80()).rstrip("\n")[:end]
    log.write_text(line_of(COMBINE) + torn)

    with caplog.at_level(logging.WARNING, "mlagen"):
        specs = read_record(log)

    assert specs == [COMBINE]
    assert caplog.messages == [f"{log}:2: skipped a line without its end"]


@pytest.mark.parametrize(("text", "specs"), [("", []), (line_of(COMBINE).strip(), [COMBINE])])
def test_a_short_record_is_read(text: str, specs: list[KernelSpec], log: Path) -> None:
    """A run without calls writes an empty one, and a hand-edited one may lack the last newline."""
    log.write_text(text)

    assert read_record(log) == specs
    assert len(read_record(log, archs="sm_80")) == len(specs)


RULE = 'expected a record such as {"kernel": "..."}, got '
TEXT = "kernel: expected family(name=value, ...), got 'x'"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compiling x\n", f"{RULE}'compiling x'"),
        ("{}\n", f"{RULE}'{{}}'"),
        ("[1]\n", f"{RULE}'[1]'"),
        ('{"kernel": 1}\n', f"{RULE}'{{\"kernel\": 1}}'"),
        ('{"kernel": "x"}\n', TEXT),
        ('{"kernel": "x"}', TEXT),
        ('{"kernel": "comb\n', f'{RULE}\'{{"kernel": "comb\''),
        ("\xff" * 61 + "\n", RULE + "'" + "\xff" * 60 + "...'"),
    ],
)
def test_an_invalid_line_is_rejected_with_its_position(line: str, message: str, log: Path) -> None:
    """The message has file, line, rule and content."""
    log.write_text(line_of(COMBINE) + line, encoding="utf-8")

    with pytest.raises(ArgumentError) as caught:
        read_record(log)

    assert str(caught.value) == f"{log}:2: {message}"


def test_a_missing_record_is_rejected(log: Path) -> None:
    """The message has the path."""
    with pytest.raises(ArgumentError, match="expected a readable file, got No such file"):
        read_record(log)


def test_a_record_of_the_engine_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record written by a run can be prewarmed."""
    monkeypatch.setenv("MLAGEN_RECORD", str(log))
    current_settings.cache_clear()

    engine.find_or_build(COMBINE)

    assert read_record(log) == [COMBINE]
