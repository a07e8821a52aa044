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
from cache_tools.options.entry_options import age
from cache_tools.options.options import names, numbers
from mlagen.settings import current_settings

from .conftest import ROOT, Run, Start

HEAVY = ("torch", "jinja2", "cuda.bindings.driver", "filelock")


@pytest.mark.parametrize(
    ("option", "begin"),
    [("--version", f"mlagen {mlagen.__version__}\n"), ("-h", "Usage: mlagen [OPTIONS]")],
)
def test_the_module_is_the_command(option: str, begin: str) -> None:
    """`python3 -m cache_tools` is `mlagen`, and calls itself so."""
    ran = subprocess.run(
        [sys.executable, "-m", "cache_tools", option],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert ran.stdout.startswith(begin)


@pytest.mark.parametrize("words", ["--help", "-h", "cache -h", "cache"])
def test_help_is_printed(words: str, run: Run) -> None:
    """The short option prints the same help as the long one; a group alone prints its own."""
    result = run(*words.split())

    assert result.exit_code == (0 if "-" in words else result.exit_code)
    assert (result.stdout + result.stderr).startswith("Usage: mlagen ")


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (age, "90s", 90),
        (age, "1.5 min", 90),
        (age, "12h", 43_200),
        (age, " 30d", 2_592_000),
        (age, "2w", 1_209_600),
        (age, None, None),
        (names, "bf16, fp16", ["bf16", "fp16"]),
        (names, None, None),
        (numbers(0), "0,64", [0, 64]),
        (numbers(1), None, None),
    ],
)
def test_values_are_parsed(
    parse: Callable[..., object], text: str | None, expected: object
) -> None:
    """Blanks are ignored, and a missing option is None."""
    assert parse(click.Context(click.Command("any")), click.Option(["--any"]), text) == expected


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (age, ["", "30", "d", "-1d", "1e3s", "1 month", "1d 2h"], "expected an age such as 90min"),
        (numbers(1), ["0", "1,big", "-1", ""], "expected numbers from 1 on, with commas"),
    ],
    ids=["ages", "numbers"],
)
def test_invalid_values_are_rejected(
    parse: Callable[..., object], texts: list[str], message: str
) -> None:
    """The message has the rule and the value."""
    for text in texts:
        with pytest.raises(click.BadParameter) as caught:
            parse(click.Context(click.Command("any")), click.Option(["--any"]), text)
        assert caught.value.message.startswith(message)
        assert caught.value.message.endswith(f"got {text!r}")


def test_the_cache_can_be_chosen_for_one_command(run: Run, tmp_path: Path) -> None:
    """`--cache-dir` overrides the variable, and expands a tilde as the variable does."""
    chosen = run("--cache-dir", str(tmp_path / "other"), "cache", "dir")
    from_home = run("--cache-dir", "~/kernels", "cache", "dir")

    assert chosen.stdout == f"{tmp_path / 'other'}\n"
    assert from_home.stdout == f"{Path.home() / 'kernels'}\n"


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


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("--version", 0),
        ("--help", 0),
        ("cache dir", 0),
        ("cache ls", 0),
        ("cache ls --arch sm_90a --json", 0),
        ("cache stats", 0),
        ("cache verify", 0),
        ("cache why SPEC", 1),
        ("cache prune --older-than 1d", 0),
        ("cache gc", 0),
        ("resources", 0),
        ("cache clear --yes", 0),
        ("cache show abcdef", 2),
        ("cache rm abcdef", 2),
        ("doctor", 0),
        ("prewarm --dry-run --arch sm_90a", 1),
    ],
)
def test_inspection_needs_no_package_and_creates_nothing(
    words: str, code: int, start: Start, cache_dir: Path
) -> None:
    """It works without torch, Jinja, CUDA bindings and filelock, and without a cache."""
    spec = "combine(arch=sm_80, dtype=bf16, head_dim_vo=512)"
    process = start(*(spec if word == "SPEC" else word for word in words.split()), without=HEAVY)

    _, errors = process.communicate(timeout=60)

    assert process.returncode == code, errors
    assert not cache_dir.exists()
    assert not current_settings().lock_dir.exists()


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
