"""The command as a whole: its name, errors, exit codes and side effects."""

from __future__ import annotations

import logging
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
from tests.kernels import COMBINE

from .conftest import ROOT, Run
from .many import fill

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


# Commands on a missing cache, and their exit codes.
INSPECTIONS = {
    "--version": 0,
    "--help": 0,
    "cache dir": 0,
    "cache ls": 0,
    "cache ls --arch sm_90a --json": 0,
    "cache stats": 0,
    "cache verify": 0,
    "cache why SPEC": 1,
    "cache prune --older-than 1d": 0,
    "cache gc": 0,
    "resources": 0,
    "cache clear --yes": 0,
    "cache show abcdef": 2,
    "cache rm abcdef": 2,
    "doctor": 0,
    "prewarm --dry-run --arch sm_90a": 1,
}


def output_of(script: str, *arguments: str) -> str:
    """Return the output of a Python process."""
    ran = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


def test_inspection_needs_no_package_and_creates_nothing(cache_dir: Path) -> None:
    """It works without torch, Jinja, CUDA bindings and filelock, and without a cache."""
    script = f"""
import sys
sys.modules.update(dict.fromkeys({HEAVY}))
from click.testing import CliRunner
from cache_tools.cli import cli
for line in sys.argv[1:]:
    words = ["{COMBINE}" if word == "SPEC" else word for word in line.split()]
    result = CliRunner().invoke(cli, words)
    print(result.exit_code, line)
    assert isinstance(result.exception, (SystemExit, type(None))), result.exception
"""

    found = output_of(script, *INSPECTIONS).splitlines()

    assert found == [f"{code} {line}" for line, code in INSPECTIONS.items()]
    assert not cache_dir.exists()
    assert not current_settings().lock_dir.exists()


COMPLETION = """
from click.shell_completion import BashComplete
for words in ("prewarm --model ", "prewarm --arch ", "kernel show combine(", "cache show "):
    *args, typed = words.split(" ")
    BashComplete(cli, {}, "mlagen", "_MLAGEN_COMPLETE").get_completions(args, typed)
"""


@pytest.mark.parametrize(
    ("work", "heavy"),
    [
        ("", ("numpy", "rich", "mlagen.engine")),
        ("cli(['cache', 'ls'])", ("numpy", "rich", "mlagen.engine")),
        (COMPLETION, ("numpy", "rich")),
    ],
    ids=["start", "a list", "completion"],
)
def test_quick_commands_import_no_more_than_click(
    work: str, heavy: tuple[str, ...], cache_dir: Path
) -> None:
    """The command line starts, lists and completes models, targets, specs and keys at once."""
    fill(cache_dir, 2)
    names = [*HEAVY, *heavy] if work != COMPLETION else ["torch", "jinja2", *heavy]

    found = output_of(
        "import atexit, sys; from cache_tools.cli import cli\n"
        "atexit.register(lambda: print([m for m in sys.argv[1:] if m in sys.modules]))\n"
        f"{work}",
        *names,
    )

    assert found.splitlines()[-1] == "[]"
    assert ("2 kernels by " in found) == ("ls" in work)
