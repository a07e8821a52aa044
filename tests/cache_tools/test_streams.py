"""Texts of files, URLs, variables and other processes: none of them controls the terminal."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from pathlib import Path
from typing import Any

import cuda.pathfinder
import pytest
from click.testing import Result
from rich.text import Text

from cache_tools.output.report import console
from mlagen.logs import StderrHandler, visible
from tests.cache.builds import make_build, make_store
from tests.cache.bundle_cases import bundle_bytes, key_for
from tests.cache_tools.benchmark.test_results import document
from tests.fixture_types import Patch
from tests.observed_calls import built, observe

from .conftest import Setting, on_a_terminal, run

# A title, a bell, a color, a rewritten line, C1 controls and reversed text.
EVIL = "\x1b]0;owned\x07\x1b[31m\rok\x9b2J\x85\u202e\x00\x7f"
SHOWN = r"\x1b]0;owned\x07\x1b[31m\rok\x9b2J\x85\u202e\x00\x7f"
NAME = EVIL.replace("\x00", "")  # of a file, which has no null character
_CONTROL = re.compile(r"[^\n\t\x20-\x7e]")


def evil(value: Any) -> Any:
    """Return JSON data whose texts have control characters at their ends."""
    if isinstance(value, dict):
        return {name: evil(each) for name, each in value.items()}
    if isinstance(value, list):
        return list(map(evil, value))
    return value + EVIL if isinstance(value, str) else value


@pytest.fixture
def dump(monkeypatch: Patch, tmp_path: Path) -> Path:
    """Return a dump with control characters in what `replay` prints."""
    observe(monkeypatch, MLAGEN_DUMP=str(tmp_path / "dumps"), MLAGEN_DUMP_TENSORS="1")
    function, arguments = built("xqa_batch_mla")
    function(**arguments)
    (path,) = (tmp_path / "dumps").glob("*.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    names = ("mlagen", "torch", "environment", "outcome")
    said = evil({name: data[name] for name in names}) | {"gpu": {"name": EVIL}}
    said["outcome"]["error"] = EVIL
    path.write_text(json.dumps(data | said), encoding="utf-8")
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a bundle of a kernel whose source and log have control characters."""
    build = make_build()
    files = {"kernel.cu": f"// {EVIL}\n".encode(), "build.log": f"{EVIL}\n".encode()}
    store = make_store(tmp_path / "there")
    build = type(build)(
        files={**build.files, **files}, facts=build.facts, toolchain=build.toolchain
    )
    store.find_or_build(key_for("mla_sm80"), lambda: build)
    path = tmp_path / f"{NAME}.tar.gz"
    path.write_bytes(bundle_bytes(store))
    return path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return results of a benchmark with control characters in every text."""
    path = tmp_path / "results.json"
    path.write_text(json.dumps(evil(document())), encoding="utf-8")
    return path


def require_visible(result: Result) -> str:
    """Require an output without control characters, and return it."""
    text = f"{result.stdout}{result.stderr}"
    assert _CONTROL.search(text) is None, text
    return text


def test_a_dump_is_visible(dump: Path) -> None:
    """`replay` shows the names and the error of a dump."""
    assert require_visible(run("replay", str(dump))).count(SHOWN) == 4
    said = run.json("replay", str(dump))["dumped"]
    assert said["error"] == said["gpu"] == EVIL


@pytest.mark.parametrize("part", ["source", "log"])
def test_an_imported_bundle_is_visible(part: str, bundle: Path) -> None:
    """The name of the file, the source and the log are shown; the document has them as they are."""
    imported = require_visible(run("cache import", str(bundle)))
    key = key_for("mla_sm80").digest[:8]
    assert visible(NAME) in imported
    assert SHOWN in require_visible(run(f"cache show {key} --{part}"))
    (entry,) = json.loads(run(f"cache show {key} --{part} --json").stdout)["entries"]
    assert EVIL in entry[part]


def test_results_of_a_benchmark_are_visible(results: Path) -> None:
    """Tables, their header and problems are shown, also beside a baseline."""
    wrong = json.loads(results.read_text(encoding="utf-8"))
    for case in wrong["cases"]:
        case["mlagen"] |= {"is_right": False, "problem": f"a\n{EVIL}"}
    broken = results.with_name("broken.json")
    broken.write_text(json.dumps(wrong), encoding="utf-8")

    lines = (
        ("bench --from-json", str(results)),
        ("bench --from-json", str(broken)),
        ("bench --from-json", str(broken), "--baseline", str(results)),
    )
    for line in lines:
        assert SHOWN in require_visible(run(*line))
    problems = run("bench --from-json", str(broken)).stderr.splitlines()
    assert len(problems) == len(wrong["cases"])


@pytest.mark.parametrize(
    "line",
    [
        ("cache import", f"{NAME}/none.tar.gz"),
        ("cache pull", f"http://u:p@{NAME}/k"),
        ("cache show", NAME),
        ("cache why", NAME),
        ("cache rm", NAME),
        ("kernel show", NAME),
        ("kernel show", f"combine({NAME}=1)"),
        ("prewarm --model", NAME),
        ("prewarm", f"{NAME}.toml"),
        ("prewarm --from-log", NAME),
        ("bench --from-json", NAME),
        ("bench --suite", NAME),
        ("replay", NAME),
        ("cache", NAME),
        (f"--{NAME}",),
        ("cache export", f"{NAME}/x"),
    ],
    ids=lambda line: line[0] if line[0].isprintable() else "an option",
)
def test_an_error_is_visible_on_one_line(line: tuple[str, ...]) -> None:
    """Names in messages do not control the terminal either."""
    result = run("", *shlex.split(line[0]) if line[0].isprintable() else line, *line[1:])
    assert result.exit_code
    (error,) = re.sub("downloading .*\n", "", require_visible(result)).splitlines()
    assert error.startswith("mlagen: ")


@pytest.mark.parametrize("name", ["MLAGEN_CACHE_DIR", "MLAGEN_CACHE_RO", "MLAGEN_LOCK_DIR"])
def test_a_variable_is_visible(name: str, setting: Setting, tmp_path: Path) -> None:
    """Folders of variables are shown in reports."""
    setting(name, tmp_path / NAME)
    assert visible(NAME) in require_visible(run("doctor"))


def test_the_output_of_a_tool_is_visible(bundle: Path, monkeypatch: Patch, tmp_path: Path) -> None:
    """What nvdisasm prints is shown."""
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\nprintf 'MOV \\033[31m\\007'\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_binary_utility", lambda _: str(tool))
    run("cache import", str(bundle))
    assert "MOV \\x1b[31m\\x07" in require_visible(
        run("cache show --sass", key_for("mla_sm80").digest)
    )


class _Alone(StderrHandler):
    def _has_others(self, _name: str) -> bool:
        return False  # pytest has handlers


def test_the_log_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    """So is a line of the log, which an application without logging gets on its stderr."""
    _Alone().emit(logging.makeLogRecord({"msg": EVIL}))
    assert capsys.readouterr().err.endswith(f"{SHOWN}\n")


def test_a_terminal_is_controlled_by_the_bar_only(bundle: Path) -> None:
    """The file that a bar names is shown, and the screen ends clean."""
    code, output = on_a_terminal("cache", "import", str(bundle))
    assert code == 0
    assert visible(NAME) in output
    assert re.findall(r"\x07|\x1b\]|\x1b\[31m", output) == []


def test_a_folder_is_bytes_for_programs_only(setting: Setting, tmp_path: Path) -> None:
    """`cache dir` prints the path as it is, except to a terminal."""
    setting("MLAGEN_CACHE_DIR", tmp_path / NAME)
    assert run("cache dir").stdout_bytes == os.fsencode(tmp_path / NAME) + b"\n"
    assert on_a_terminal("cache", "dir") == (0, f"{tmp_path}/{visible(NAME)}\r\n")


def test_a_line_beside_a_bar_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich prints a warning of a library while it draws a bar."""
    console().print(Text(f"warning {EVIL}"), soft_wrap=True)
    written = capsys.readouterr().out
    assert _CONTROL.search(written) is None
    assert r"\x9b2J" in written


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_text_is_visible_in_every_locale(encoding: str, bundle: Path) -> None:
    """A terminal gets no control character of a source, whatever its encoding."""
    run("cache import", str(bundle))
    key = key_for("mla_sm80").digest
    code, output = on_a_terminal("cache", "show", key, "--source", PYTHONIOENCODING=encoding)
    assert (code, output) == (0, f"// {SHOWN}\r\n")
