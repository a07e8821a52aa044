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


def output_of(*arguments: str) -> str:
    """Return the output of a Python process."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


HEAVY = ("torch", "jinja2", "cuda.bindings.driver", "filelock")


@pytest.mark.parametrize(
    ("option", "begin"),
    [("--version", f"mlagen {mlagen.__version__}\n"), ("-h", "Usage: mlagen [OPTIONS]")],
)
def test_the_module_is_the_command(option: str, begin: str) -> None:
    """`python3 -m cache_tools` is `mlagen`, and calls itself so."""
    assert output_of("-m", "cache_tools", option).startswith(begin)


@pytest.mark.parametrize("words", ["--help", "-h", "cache -h", "cache"])
def test_help_is_printed(words: str, run: Run) -> None:
    """The short option prints the same help as the long one; a group alone prints its own."""
    result = run(*words.split())

    assert result.exit_code == (0 if "-" in words else result.exit_code)
    assert (result.stdout + result.stderr).startswith("Usage: mlagen ")


AGES = {"90s": 90, "1.5 min": 90, "12h": 43_200, " 30d": 2_592_000, "2w": 1_209_600}
AGE, NUMBERS = "expected an age such as 90min", "expected numbers from 1 on, with commas"


@pytest.mark.parametrize(
    ("parse", "parsed", "invalid", "message"),
    [
        (age, AGES, ["", "30", "d", "-1d", "1e3s", "1 month", "1d 2h"], AGE),
        (numbers(1), {"1,64": [1, 64]}, ["0", "1,big", "-1", ""], NUMBERS),
        (numbers(0), {"0,64": [0, 64]}, [], ""),
        (names, {"bf16, fp16": ["bf16", "fp16"]}, [], ""),
    ],
    ids=["ages", "numbers", "with zero", "names"],
)
def test_values_are_parsed_or_rejected(
    parse: Callable[..., object], parsed: dict[str, object], invalid: list[str], message: str
) -> None:
    """Blanks are ignored, a missing option is None, and a message has the rule and the value."""
    context, option = click.Context(click.Command("any")), click.Option(["--any"])

    assert {text: parse(context, option, text) for text in parsed} == parsed
    assert parse(context, option, None) is None
    for text in invalid:
        with pytest.raises(click.BadParameter) as caught:
            parse(context, option, text)
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

    found = output_of("-c", script, *INSPECTIONS).splitlines()

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
        "-c",
        "import atexit, sys; from cache_tools.cli import cli\n"
        "atexit.register(lambda: print([m for m in sys.argv[1:] if m in sys.modules]))\n"
        f"{work}",
        *names,
    )

    assert found.splitlines()[-1] == "[]"
    assert ("2 kernels by " in found) == ("ls" in work)
