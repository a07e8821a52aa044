"""`mlagen prewarm`: options, output, and exit codes."""

from __future__ import annotations

import threading
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

import mlagen
from cache_tools.output import progress
from mlagen import engine, prewarming
from mlagen.compiler import process
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.prewarming import PrewarmReport
from tests.faults.steps import warnings_in
from tests.fixture_types import Log, Patch
from tests.kernels import COMBINE

from .conftest import Cached, Setting, raising, run

pytestmark = pytest.mark.usefixtures("compiled_once")
OPTIONS = "--arch sm_80 --family combine --dtype bf16 --kv-lora-rank 256,512"
SMALL = ("prewarm", *OPTIONS.split())


@pytest.mark.parametrize("isolate", [(), ("--isolate",)], ids=["threads", "processes"])
def test_kernels_are_built_and_described(isolate: tuple[str, ...], cache_dir: Path) -> None:
    """A unit has spec, status, times, key and resources; a quiet run prints a document alone."""
    found = run.json(*SMALL, *isolate)
    again, quiet = (
        run(*SMALL, *isolate),
        [run(*SMALL, *o) for o in (["-q"], ["--quiet", "--dry-run"])],
    )

    units, ms = found.pop("units"), found["totals"].pop("ms")
    others = dict.fromkeys(("hit", "failed", "timeout", "skipped", "missing", "loaded"), 0)
    totals = {"units": 2, "built": 2, **others}
    assert found == {"cache_dir": str(cache_dir), "totals": totals, "left_out": [], "bundle": None}
    for unit, dim in zip(units, ("512", "256"), strict=True):
        variant = {"batch_invariant": "False", "has_output_gate": "False"}
        spec = {"arch": "sm_80", "dtype": "bf16", "head_dim_vo": dim, **variant}
        assert unit["spec"] == spec
        assert (unit["family"], unit["arch"]) == ("combine", "sm_80")
        assert (unit["status"], unit["error"], unit["spill_bytes"]) == ("built", None, 0)
        assert (unit["toolchain"], len(unit["key"])) == (str(find_nvrtc()), 64)
        assert 0 < unit["ms"] <= ms
        assert unit["registers"] > 0
        assert unit["cubin_bytes"] > 0
    assert [line.split()[0] for line in again.stderr.splitlines()] == ["hit", "hit"]
    assert again.stdout.startswith("2 kernels: 0 built, 2 hit, 0 failed, in ")
    assert [(each.exit_code, each.stdout, each.stderr) for each in quiet] == [(0, "", "")] * 2
    assert run(*SMALL, "-q", "--json").stderr == ""


def test_a_large_selection_is_announced_with_the_options_for_fewer(monkeypatch: Patch) -> None:
    """A selection by a kernel's text has no such line, and a quiet run announces nothing."""
    monkeypatch.setattr(progress, "MANY", 2)
    texts = ("--kernel", str(COMBINE), "--kernel", str(COMBINE).replace("512", "256"))

    for words, begins in (
        (("prewarm", *texts), ["compiling", "built", "built"]),
        ((*SMALL, "--dtype", "fp16", "--kv-lora-rank", "512"), ["compiling", "built"]),
        ((*SMALL, "--arch", "sm_86"), ["compiling", "for", "built", "built"]),
        ((*SMALL, "--arch", "sm_89", "--quiet"), []),
    ):
        assert [line.split()[0] for line in run(*words).stderr.splitlines()] == begins


def test_a_dry_run_lists_missing_kernels(cached: Cached) -> None:
    """Each kernel has a row with status and key prefix; the exit code is 1 if one is missing."""
    result = run(*SMALL, "--dry-run", "--dtype", "bf16,fp16")
    found = run(*SMALL, "--dry-run")

    header, *rows, count, last = result.stdout.splitlines()
    assert (result.exit_code, header.split()[:3]) == (1, ["status", "key", "kernel"])
    assert [row.split()[0] for row in rows] == ["hit", "hit", "missing", "missing"]
    assert rows[0].split()[1] == cached.keys[0][:8]
    assert count.startswith("4 kernels: 2 hit, 2 missing, in ")
    assert last == "exit code 1: 2 kernels missing; without --dry-run, prewarm compiles them"
    assert found.exit_code == 0
    assert found.stdout.splitlines()[-1].startswith("2 kernels: 2 hit, 0 missing, in ")


@pytest.mark.parametrize("variable", ["MLAGEN_JIT=off", "MLAGEN_TOOLCHAIN=nvrtc-12.8.93"])
def test_what_may_not_be_compiled_is_missing(variable: str, setting: Setting) -> None:
    """Each missing kernel fails with the variable's name."""
    setting(*variable.split("="))
    first, *lines = run(*SMALL).stderr.splitlines()
    assert first == "2 kernels missing, 0 cached"
    assert [line.split()[0] for line in lines] == ["failed", "failed"]
    assert all(variable.partition("=")[0] in line for line in lines)


def test_a_dry_run_says_why_cached_kernels_are_missing(cached: Cached, caplog: Log) -> None:
    """An untrusted cache is named once, and a damaged kernel with its damage."""
    cached.paths[0].write_bytes(b"cut off")
    run(*SMALL, "--dry-run")
    (damaged,) = warnings_in(caplog)
    assert damaged.startswith("cache: damaged, so missing: combine(")
    cached.root.chmod(0o777)
    caplog.clear()
    run(*SMALL, "--dry-run")
    (unreadable,) = warnings_in(caplog)
    assert unreadable.startswith("cache: unreadable, so missing: combine(")
    assert f"(chmod -R go-w {cached.root}, " in unreadable


@pytest.mark.parametrize("is_file", [False, True], ids=["option", "file"])
def test_unsupported_parts_are_omitted_and_named(is_file: bool, tmp_path: Path) -> None:
    """stderr, even of a quiet run, and the document name them; the rest is compiled."""
    options: tuple[str, ...] = ("--model", "glm-5.3-flash", "--kv-dtype", "bf16,fp8_per_token")
    if is_file:
        options = (str(tmp_path / "fleet.toml"),)
        table = '[[kernel]]\nmodel = "glm-5.3-flash"\nkv_dtype = ["bf16", "fp8_per_token"]\n'
        Path(*options).write_text(table)
    command = ("prewarm", *options, "--arch", "H100", "--dry-run")

    found = run.json(*command, code=1)

    begin = "glm-5.3-flash: no MLA decode kernel for query fp8_per_token, cache fp8_per_token, "
    layers, *pairs = found["left_out"]
    assert layers.startswith("glm-5.3-flash: layers of linear_attention: they have a recurrent st")
    assert pairs
    assert all(sentence.startswith(begin) for sentence in pairs)
    for quiet in ((), ("--quiet",)):
        lines = run(*command, *quiet).stderr.splitlines()
        left_out = [line for line in lines if line.startswith("left out ")]
        assert left_out == [f"left out {sentence}" for sentence in found["left_out"]]
    assert {unit["arch"] for unit in found["units"]} == {"sm_90a"}
    assert "bf16" in {unit["spec"].get("kv_dtype") for unit in found["units"]}


@pytest.mark.usefixtures("cached")
def test_without_nvrtc_missing_kernels_are_named(monkeypatch: Patch) -> None:
    """Cached kernels are hits, each miss has a line, and the last one names the package."""
    missing = raising(mlagen.ToolchainError("NVRTC: not here"))
    monkeypatch.setattr("mlagen.prewarming.run.find_nvrtc", missing)

    result = run(*SMALL, "--dtype", "bf16,fp16")

    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (3, "")
    assert [line.split()[0] for line in lines[:-1]] == ["hit", "hit", "missing", "missing"]
    assert lines[-1] == "mlagen: NVRTC: not here"


def test_options_reach_the_selection(monkeypatch: Patch) -> None:
    """Lists are split at commas, numbers are parsed, and missing options are omitted."""
    given: dict[str, Any] = {}

    def record(archs: list[str], **options: Any) -> PrewarmReport:
        given.update(options, archs=archs)
        return PrewarmReport(units=(), loaded=0, ms=1.0)

    monkeypatch.setattr(prewarming, "prewarm", record)
    options = (
        "--arch sm_90a,native --family mla_sm80 --dtype bf16,fp16 --page-size 32,64 "
        "--heads 16,128 --q-len 2 -j 3 --load --kv-dtype e4m3 --head-dim 128 --kv-heads 8 "
        "--lookup sparse --tp 1,8 --isolate --timeout 9.5 --fail-fast"
    )
    models = ("--model", "kimi-k2, ./config.json")

    result = run("prewarm", *options.split(), *models, "--kernel", str(COMBINE))

    lists: dict[str, Any] = {
        "dtype": ["bf16", "fp16"],
        "page_size": [32, 64],
        "heads": [16, 128],
        "q_len": [2],
    }
    lists |= {"kv_dtype": ["e4m3"], "head_dim": [128], "kv_heads": [8], "lookup": ["sparse"]}
    lists |= {"archs": ["sm_90a", "native"], "families": ["mla_sm80"], "tp": [1, 8]}
    lists |= {"models": ["kimi-k2", "./config.json"], "kernels": [COMBINE]}
    flags: dict[str, Any] = {"isolate": True, "fail_fast": True, "dry_run": False, "load": True}
    flags |= {"timeout_s": 9.5, "jobs": 3}
    assert result.exit_code == 0
    assert callable(given.pop("on_event"))
    assert given == lists | flags


NO = mlagen.CompileError("NVRTC: no", log="", source="")
NO_TARGET = mlagen.ToolchainError("no")
NO_CACHE = mlagen.CacheError("no", path=Path("x"))


@pytest.mark.parametrize(
    ("errors", "code"),
    [([NO], 1), ([NO_TARGET], 3), ([NO_CACHE], 4), ([NO, NO_TARGET], 1), ([NO, NO_CACHE], 4)],
    ids=["a kernel", "the target", "the cache", "a kernel, a target", "a kernel, the cache"],
)
def test_failures_decide_the_exit_code(
    errors: list[mlagen.MlagenError], code: int, monkeypatch: Patch
) -> None:
    """Of different kinds it is 1, but a cache that cannot be used fails all; all are reported."""

    def fail(*_: object) -> None:
        raise next(left)

    monkeypatch.setattr(engine, "build_spec", fail)
    left = cycle(errors)
    units = run.json(*SMALL, "-j", "1", code=code)["units"]
    left = cycle(errors)
    quiet = run(*SMALL, "-j", "1", "--quiet")

    failed = {("failed", str(error)) for error in errors}
    ends = [f"{line.split()[0]} {line.rpartition(': ')[2]}" for line in quiet.stderr.splitlines()]
    assert len(units) == 2
    assert {(unit["status"], unit["error"]) for unit in units} == failed
    assert (quiet.exit_code, quiet.stdout, len(ends)) == (code, "", 2)
    assert {*ends} == {f"failed {str(error).removeprefix('NVRTC: ')}" for error in errors}


HANGS, DIES = "import time; time.sleep(600)", "raise SystemExit(1)"


@pytest.mark.parametrize(
    ("commands", "options", "code", "counts"),
    [
        ((HANGS, HANGS), "--timeout 0.1 -j 2", 5, "0 failed, 2 timeout"),
        ((DIES, HANGS), "--timeout 2 -j 2", 1, "1 failed, 1 timeout"),
        ((DIES, DIES), "--timeout 60 -j 2", 1, "2 failed"),
        ((DIES,), "--fail-fast -j 1", 1, "1 failed, 1 skipped"),
    ],
    ids=["timeouts", "one of each", "deaths", "the first failure"],
)
def test_timeouts_have_an_exit_code(
    commands: list[str], options: str, code: int, counts: str, monkeypatch: Any
) -> None:
    """Timeouts alone exit with 5; kernels that --fail-fast never starts are skipped."""
    left = iter(commands)
    hello = process._BOOT.partition("sys.path[:]")[0]
    start, turn = process.CompileProcesses._start, threading.Lock()

    def start_next(*arguments: Any) -> Any:
        with turn:
            monkeypatch.setattr(process, "_BOOT", hello + next(left))
            return start(*arguments)

    monkeypatch.setattr(process.CompileProcesses, "_start", start_next)
    result = run(*SMALL, "--isolate", *options.split())
    _plan, *lines = result.stderr.splitlines()
    assert result.exit_code == code
    assert result.stdout.startswith(f"2 kernels: 0 built, 0 hit, {counts}, in ")
    for count, status in (part.split() for part in counts.split(", ")):
        assert sum(line.startswith(f"{status} ") for line in lines) == int(count)
