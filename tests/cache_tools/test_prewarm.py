"""`mlagen prewarm`: options, output, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import mlagen
from cache_tools.output import progress
from mlagen import engine, prewarming
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.prewarming import PrewarmReport, gpus
from tests.kernels import COMBINE

from .conftest import Run

SMALL = (
    *("prewarm", "--arch", "sm_80", "--family", "combine", "--dtype", "bf16"),
    *("--kv-lora-rank", "256,512"),
)


def test_kernels_are_compiled_and_counted(run: Run, cache_dir: Path) -> None:
    """Each kernel has a line on stderr, and stdout has the totals."""
    result = run(*SMALL)

    assert result.exit_code == 0
    plan, *lines = result.stderr.splitlines()
    assert plan.startswith("compiling 2 kernels, 0 cached: about ")
    assert [line.split()[0] for line in lines] == ["built", "built"]
    assert result.stdout.startswith("2 kernels: 2 built, 0 hit, 0 failed, in ")
    assert result.stdout.endswith(f", cache {cache_dir}\n")


@pytest.mark.parametrize("is_quiet", [False, True], ids=["", "quiet"])
def test_a_large_selection_is_announced_with_the_options_for_fewer(
    is_quiet: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A selection by a kernel's text has no such line, and a quiet run announces nothing."""
    monkeypatch.setattr(progress, "MANY", 1)
    quiet = ("--quiet",) if is_quiet else ()

    one = run("prewarm", "--kernel", str(COMBINE), *quiet).stderr.splitlines()
    every = run(*SMALL, *quiet).stderr.splitlines()

    words = [[line.split()[0] for line in lines] for lines in (one, every)]
    begins = [["compiling", "built"], ["hit", "compiling", "for", "built"]]
    assert words == ([[], []] if is_quiet else begins)


def test_json_has_every_unit_and_the_totals(run: Run, cache_dir: Path) -> None:
    """With --json, stdout is one document; the text is on stderr."""
    result = run(*SMALL, "--kv-lora-rank", "512", "--json")

    document = json.loads(result.stdout)
    (unit,) = document.pop("units")
    ms = document["totals"].pop("ms")
    assert document == {
        "cache_dir": str(cache_dir),
        "totals": {
            "units": 1,
            "hit": 0,
            "built": 1,
            "failed": 0,
            "timeout": 0,
            "skipped": 0,
            "missing": 0,
            "loaded": 0,
        },
        "left_out": [],
        "bundle": None,
    }
    assert unit["spec"] == {"arch": "sm_80", "dtype": "bf16", "head_dim_vo": "512"}
    assert (unit["family"], unit["arch"]) == ("combine", "sm_80")
    assert (unit["status"], unit["error"], unit["spill_bytes"]) == ("built", None, 0)
    assert unit["toolchain"] == str(find_nvrtc())
    assert 0 < unit["ms"] <= ms
    assert unit["registers"] > 0
    assert unit["cubin_bytes"] > 0
    assert len(unit["key"]) == 64
    assert result.stderr.splitlines()[-1].startswith("1 kernel: 1 built, 0 hit, 0 failed, in ")


def test_a_dry_run_lists_missing_kernels(run: Run, cached: PrewarmReport) -> None:
    """Each kernel has a row with its status and key prefix, and the exit code is 1."""
    result = run(
        *("prewarm", "--arch", "sm_80", "--family", "combine", "--dry-run"),
        *("--kv-lora-rank", "256,512", "--dtype", "bf16,fp16"),
    )

    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[0].split()[:3] == ["status", "key", "kernel"]
    assert [line.split()[0] for line in lines[1:5]] == ["hit", "hit", "missing", "missing"]
    assert lines[1].split()[1] == cached.units[0].key[:8]
    assert lines[5].startswith("4 kernels: 2 hit, 2 missing, in ")
    assert lines[6:] == ["exit code 1: 2 kernels missing"]


@pytest.mark.parametrize("is_file", [False, True], ids=["option", "file"])
@pytest.mark.parametrize("quiet", [(), ("--quiet",)], ids=["", "quiet"])
def test_unsupported_parts_are_omitted_and_named(
    is_file: bool, quiet: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    """stderr, even of a quiet run, and the document name them; the rest is compiled."""
    options: tuple[str, ...] = ("--model", "glm-5.3-flash", "--kv-dtype", "bf16,e4m3")
    if is_file:
        file = tmp_path / "fleet.toml"
        file.write_text('[[kernel]]\nmodel = "glm-5.3-flash"\nkv_dtype = ["bf16", "e4m3"]\n')
        options = (str(file),)

    result = run("prewarm", *options, "--arch", "H100", "--dry-run", "--json", *quiet)

    document = json.loads(result.stdout)
    lines = [line for line in result.stderr.splitlines() if line.startswith("left out ")]
    begin = "glm-5.3-flash: no MLA decode kernel for query e4m3, cache e4m3, "
    assert result.exit_code == 1
    assert all(sentence.startswith(begin) for sentence in document["left_out"])
    assert lines == [f"left out {sentence}" for sentence in document["left_out"]]
    assert lines
    assert {unit["arch"] for unit in document["units"]} == {"sm_90a"}
    assert "e4m3" in {unit["spec"].get("kv_dtype") for unit in document["units"]}


def test_an_unsupported_model_is_rejected(run: Run) -> None:
    """The message has the supported alternatives, and nothing is compiled."""
    result = run("prewarm", "--model", "deepseek-v3", "--kv-dtype", "int8", "--arch", "sm_90a")

    assert result.exit_code == 2
    assert result.stderr.startswith(
        "mlagen: deepseek-v3: no MLA decode kernel for query bf16, cache int8; supported: "
    )


def test_a_dry_run_that_misses_nothing_exits_with_0(run: Run, cached: PrewarmReport) -> None:
    """An image build can check that every kernel is cached."""
    texts = [option for unit in cached.units for option in ("--kernel", str(unit.spec))]

    result = run("prewarm", "--dry-run", *texts)

    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("2 kernels: 2 hit, 0 missing, in ")


@pytest.mark.usefixtures("cached")
def test_without_nvrtc_missing_kernels_are_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached kernels are hits, each miss has a line, and the last one names the package."""

    def missing() -> None:
        raise mlagen.ToolchainError("NVRTC: not here")

    monkeypatch.setattr("mlagen.prewarming.run.find_nvrtc", missing)

    result = run(*SMALL, "--dtype", "bf16,fp16")

    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (3, "")
    assert [line.split()[0] for line in lines[:-1]] == ["hit", "hit", "missing", "missing"]
    assert lines[-1] == "mlagen: NVRTC: not here"


def test_options_reach_the_selection(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists are split at commas, numbers are parsed, and missing options are omitted."""
    given: dict[str, Any] = {}

    def record(archs: list[str], **options: Any) -> PrewarmReport:
        given.update(options, archs=archs)
        return PrewarmReport(units=(), loaded=0, ms=1.0)

    monkeypatch.setattr(prewarming, "prewarm", record)

    result = run(
        *("prewarm", "--arch", "sm_90a, native", "--family", "mla_sm80", "--dtype", "bf16,fp16"),
        *("--page-size", "32,64", "--heads", "16,128", "--q-len", "2", "-j", "3", "--load"),
        *("--kv-dtype", "e4m3", "--head-dim", "128", "--kv-heads", "8", "--lookup", "sparse"),
        *("--model", "kimi-k2, ./config.json", "--tp", "1,8", "--isolate", "--timeout", "9.5"),
        *("--fail-fast", "--kernel", str(COMBINE)),
    )

    assert result.exit_code == 0
    assert callable(given.pop("on_event"))
    assert given == {
        "archs": ["sm_90a", "native"],
        "families": ["mla_sm80"],
        "dtype": ["bf16", "fp16"],
        "page_size": [32, 64],
        "heads": [16, 128],
        "q_len": [2],
        "kv_dtype": ["e4m3"],
        "head_dim": [128],
        "kv_heads": [8],
        "lookup": ["sparse"],
        "models": ["kimi-k2", "./config.json"],
        "tp": [1, 8],
        "kernels": [COMBINE],
        "isolate": True,
        "timeout_s": 9.5,
        "fail_fast": True,
        "jobs": 3,
        "dry_run": False,
        "load": True,
    }


def test_the_default_is_native(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --arch and without a GPU, the message names --arch, and the exit code is 3."""
    monkeypatch.setattr(gpus, "visible_devices", list)

    result = run("prewarm")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        "mlagen: arch: expected a supported GPU for native, got none; "
        "name targets instead, such as sm_90a\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_70"), "mlagen: arch: expected one of sm_80, "),
        (("--arch", "sm_80", "--page-size", "48"), "mlagen: page_size: expected one of 1, 8, "),
        (("--arch", "sm_80", "-j", "0"), "mlagen: jobs: expected an int, 1 or more, got 0"),
        (("--arch", "sm_80", "--q-len", "2"), "mlagen: q_len: expected heads beside it, got [2]"),
        (("--heads", "16,x"), "mlagen: heads: expected numbers from 1 on, with commas, got '16,x'"),
        (("--heads", "0"), "mlagen: heads: expected numbers from 1 on, with commas, got '0'"),
        (("extra",), "mlagen: file: expected one that ends with .toml or .json, got 'extra'"),
        (("--arch", "sm_80", "--tp", "8"), "mlagen: tp: expected none without models, got [8]"),
        (("--model", "gpt-5", "--arch", "sm_80"), "mlagen: model: expected one of "),
        (("--kernel", "x"), "mlagen: kernel: expected family(name=value, ...), got 'x'"),
        (("--timeout", "9"), "mlagen: timeout: expected --isolate with it, got it alone"),
        (
            ("--kernel", "x", "--arch", "sm_80"),
            "mlagen: arch: expected none with --kernel, whose",
        ),
    ],
    ids=[
        "arch",
        "page size",
        "jobs",
        "q_len alone",
        "letters",
        "zero heads",
        "a file without an ending",
        "GPUs without a model",
        "model",
        "kernel",
        "timeout alone",
        "arch with a kernel",
    ],
)
def test_bad_usage_exits_with_2(arguments: tuple[str, ...], message: str, run: Run) -> None:
    """An invalid option is reported on stderr."""
    result = run("prewarm", *arguments)

    assert result.exit_code == 2
    assert result.stderr.startswith(message)


def test_an_invalid_number_is_rejected_with_its_rule(run: Run) -> None:
    """The message has the rule and the value."""
    result = run("prewarm", "--page-size", "64,big")

    assert "expected numbers from 1 on, with commas, got '64,big'" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (mlagen.CompileError("no", log="", source=""), 1),
        (mlagen.ToolchainError("no"), 3),
        (mlagen.CacheError("no", path=Path("x")), 4),
    ],
    ids=["a kernel fails", "the target is unknown to NVRTC", "the disk is full"],
)
def test_failures_decide_the_exit_code(
    error: mlagen.MlagenError, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is still printed, and the exit code is that of the failure."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(engine, "build_spec", fail)

    result = run(*SMALL, "--json")

    units = json.loads(result.stdout)["units"]
    assert result.exit_code == code
    assert [(unit["status"], unit["error"]) for unit in units] == [("failed", "no")] * 2


@pytest.mark.parametrize(
    ("other", "code"),
    [(mlagen.ToolchainError("no"), 1), (mlagen.CacheError("no", path=Path("x")), 4)],
    ids=["a target", "the cache"],
)
def test_failures_of_different_kinds_exit_with_1_unless_the_cache_failed(
    other: mlagen.MlagenError, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may fail on its own; a cache that cannot be used fails all of them."""
    errors = iter([mlagen.CompileError("no", log="", source=""), other])

    def fail(*_: object) -> None:
        raise next(errors)

    monkeypatch.setattr(engine, "build_spec", fail)

    result = run(*SMALL)

    assert result.exit_code == code
    assert result.stdout.startswith("2 kernels: 0 built, 0 hit, 2 failed, in ")


def test_a_cache_that_cannot_be_written_exits_with_4(run: Run, cache_dir: Path) -> None:
    """Nothing is compiled that cannot be stored."""
    cache_dir.write_text("a file where the folder should be")

    result = run(*SMALL)

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.splitlines()[-1].startswith("mlagen: cache: expected a writable folder")
