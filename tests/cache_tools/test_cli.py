"""The command as a whole: its name, errors, exit codes and side effects."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

import mlagen
from cache_tools import cli as cli_module
from cache_tools.cli import cli
from mlagen.settings import current_settings

from .conftest import ROOT, Run, Start

HEAVY = ("torch", "jinja2", "cuda.bindings.driver", "filelock")


def test_the_version_is_the_packages(run: Run) -> None:
    """`--version` prints name and version, and nothing else."""
    result = run("--version")

    assert (result.exit_code, result.stdout) == (0, f"mlagen {mlagen.__version__}\n")


@pytest.mark.parametrize("arguments", [("--help",), ("-h",), ("cache", "-h")], ids=" ".join)
def test_help_is_printed(arguments: tuple[str, ...], run: Run) -> None:
    """The short option prints the same help as the long one."""
    result = run(*arguments)

    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: mlagen ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (mlagen.ArgumentError("x: expected 1, got 2"), 2),
        (mlagen.ToolchainError("x: expected 1, got 2"), 3),
        (mlagen.UnsupportedError("x: expected 1, got 2"), 3),
        (mlagen.CacheError("x: expected 1, got 2", path=Path("x")), 4),
        (mlagen.DriverError("x: expected 1, got 2", symbol="x"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_is_one_line_on_stderr_and_an_exit_code(
    error: mlagen.MlagenError, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every MlagenError ends the command without a traceback."""
    monkeypatch.setitem(cli.commands, "fail", click.Command("fail", callback=_raising(error)))

    result = run("fail")

    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == "mlagen: x: expected 1, got 2\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--no-such",), "No such option '--no-such'; see: mlagen --help"),
        (("no-such",), "No such command 'no-such'; see: mlagen --help"),
        (("cache", "rm"), "Missing argument 'KEY...'; see: mlagen cache rm --help"),
        (
            ("cache", "pull", "x", "--expect-sha256", "00"),
            "expect-sha256: expected 64 hex digits, got '00'; see: mlagen cache pull --help",
        ),
    ],
    ids=["option", "command", "argument", "value"],
)
def test_bad_usage_is_one_line_and_names_the_help(
    arguments: tuple[str, ...], message: str, run: Run
) -> None:
    """Usage errors of click and of the commands have one format."""
    result = run(*arguments)

    assert (result.exit_code, result.stdout) == (2, "")
    stderr = result.stderr.replace("option: --no-such;", "option '--no-such';")  # click 8.1
    assert stderr.lower() == f"mlagen: {message}\n".lower()


def test_the_cache_can_be_chosen_for_one_command(run: Run, tmp_path: Path) -> None:
    """`--cache-dir` overrides the variable, and expands a tilde as the variable does."""
    chosen = run("--cache-dir", str(tmp_path / "other"), "cache", "dir")
    from_home = run("--cache-dir", "~/kernels", "cache", "dir")

    assert chosen.stdout == f"{tmp_path / 'other'}\n"
    assert from_home.stdout == f"{Path.home() / 'kernels'}\n"


@pytest.mark.parametrize("value", ["", str(Path(__file__))], ids=["empty", "a file"])
def test_a_cache_that_is_no_folder_is_bad_usage(value: str, run: Run) -> None:
    """The message has the option, and no command runs."""
    result = run("--cache-dir", value, "cache", "dir")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "cache-dir" in result.stderr


@pytest.mark.parametrize(
    ("option", "level"), [("-v", logging.INFO), ("-vv", logging.DEBUG), ("-vvv", logging.DEBUG)]
)
def test_verbose_sets_the_log_level(
    option: str, level: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-v` is MLAGEN_LOG=info and `-vv` debug, whatever the variable says."""
    monkeypatch.setenv("MLAGEN_LOG", "off")

    assert run(option, "cache", "dir").exit_code == 0

    assert logging.getLogger("mlagen").level == level


def test_a_group_alone_prints_its_help(run: Run) -> None:
    """A group without a subcommand prints its help."""
    result = run("cache")

    assert (result.stdout + result.stderr).startswith("Usage: mlagen cache ")


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), click.Abort()], ids=["Ctrl-C", "no answer to a question"]
)
def test_an_interrupt_has_its_own_exit_code(
    error: BaseException, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted command reports it and exits with 130, as shells expect."""
    monkeypatch.setitem(cli.commands, "fail", click.Command("fail", callback=_raising(error)))

    result = run("fail")

    assert (result.exit_code, result.stderr) == (130, "mlagen: interrupted\n")


def _raising(error: BaseException) -> Callable[[], None]:
    def callback() -> None:
        raise error

    return callback


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--version",), 0),
        (("--help",), 0),
        (("cache", "dir"), 0),
        (("cache", "ls"), 0),
        (("cache", "ls", "--arch", "sm_90a", "--json"), 0),
        (("cache", "stats"), 0),
        (("cache", "verify"), 0),
        (("cache", "why", "combine(arch=sm_80, dtype=bf16, head_dim_vo=512)"), 1),
        (("cache", "prune", "--older-than", "1d"), 0),
        (("cache", "gc"), 0),
        (("resources",), 0),
        (("cache", "clear", "--yes"), 0),
        (("cache", "show", "abcdef"), 2),
        (("cache", "rm", "abcdef"), 2),
        (("doctor",), 0),
        (("prewarm", "--dry-run", "--arch", "sm_90a"), 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_inspection_needs_no_package_and_creates_nothing(
    arguments: tuple[str, ...], code: int, start: Start, cache_dir: Path
) -> None:
    """It works without torch, Jinja, CUDA bindings and filelock, and without a cache."""
    process = start(*arguments, without=HEAVY)

    _, errors = process.communicate(timeout=60)

    assert process.returncode == code, errors
    assert not cache_dir.exists()
    assert not current_settings().lock_dir.exists()


def test_the_module_is_the_command() -> None:
    """`python3 -m cache_tools` is `mlagen`."""
    ran = subprocess.run(
        [sys.executable, "-m", "cache_tools", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout == f"mlagen {mlagen.__version__}\n"


def test_starting_imports_no_more_than_click() -> None:
    """The command line starts before any heavy import."""
    script = "import sys, cache_tools.cli; print([m for m in sys.argv[1:] if m in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", script, *HEAVY, "rich", "mlagen.engine"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout == "[]\n"


def test_ctrl_c_keeps_finished_kernels(start: Start, run: Run, cache_dir: Path) -> None:
    """An interrupted prewarm exits with 130, and its cache has only complete entries."""
    process = start("prewarm", "--arch", "sm_80", "--family", "combine,mla_sm80", "-j", "1")
    assert process.stderr is not None

    first = [process.stderr.readline().split()[0] for _ in range(3)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)

    assert first == ["compiling", "for", "built"]
    assert process.returncode == 130, errors
    kept = list((cache_dir / "v1" / "e").glob("*/*/*"))
    noun = "kernel" if len(kept) == 1 else "kernels"
    assert errors.endswith(f"mlagen: interrupted, {len(kept)} {noun} kept\n")
    assert run("cache", "verify").exit_code == 0
    assert list((cache_dir / "v1" / "staging").iterdir()) == []
    assert len(kept) < 20


def test_main_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command calls itself `mlagen` however it is started."""
    names: list[dict[str, str]] = []
    monkeypatch.setattr(cli_module, "cli", lambda **named: names.append(named))

    cli_module.main()

    assert names == [{"prog_name": "mlagen"}]
