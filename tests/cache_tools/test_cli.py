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
from tests.fixture_types import Patch

from .conftest import HEAVY, ROOT, Run
from .many import fill


def output_of(*arguments: str) -> str:
    """Return the output of a Python process."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("words", "begin"),
    [("--version", f"mlagen {mlagen.__version__}\n"), ("-h", "Usage: mlagen [OPTIONS]")],
)
def test_the_module_is_the_command(words: str, begin: str, run: Run) -> None:
    """`python3 -m cache_tools` is `mlagen`, and calls itself so; a group alone prints its help."""
    assert output_of("-m", "cache_tools", words).startswith(begin)
    for line in ("--help", "cache -h", "cache"):
        result = run(*line.split())
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


@pytest.mark.parametrize("folder", ["/other", "~/kernels"])
def test_the_cache_can_be_chosen_for_one_command(folder: str, run: Run) -> None:
    """`--cache-dir` overrides the variable, and expands a tilde as the variable does."""
    chosen = run("--cache-dir", folder, "cache", "dir")
    assert chosen.stdout == f"{Path(folder).expanduser()}\n"


@pytest.mark.parametrize(
    ("option", "level"), [("-v", logging.INFO), ("-vv", logging.DEBUG), ("-vvv", logging.DEBUG)]
)
def test_verbose_sets_the_log_level(option: str, level: int, run: Run, monkeypatch: Patch) -> None:
    """`-v` is MLAGEN_LOG=info and `-vv` debug, whatever the variable says."""
    monkeypatch.setenv("MLAGEN_LOG", "off")
    assert run(option, "cache", "dir").exit_code == 0
    assert logging.getLogger("mlagen").level == level


COMPLETION = """
from click.shell_completion import BashComplete
for words in ("prewarm --model ", "prewarm --arch ", "kernel show combine(", "cache show "):
    *args, typed = words.split(" ")
    BashComplete(cli, {}, "mlagen", "_MLAGEN_COMPLETE").get_completions(args, typed)
"""


@pytest.mark.parametrize(
    ("work", "heavy"),
    [
        ("", (*HEAVY, "numpy", "rich", "mlagen.engine")),
        ("cli(['cache', 'ls'])", (*HEAVY, "numpy", "rich", "mlagen.engine")),
        (COMPLETION, ("torch", "jinja2", "numpy", "rich")),
    ],
    ids=["start", "a list", "completion"],
)
def test_quick_commands_import_no_more_than_click(
    work: str, heavy: tuple[str, ...], cache_dir: Path
) -> None:
    """The command line starts, lists and completes models, targets, specs and keys at once."""
    fill(cache_dir, 2)
    script = (
        "import atexit, sys; from cache_tools.cli import cli\n"
        "atexit.register(lambda: print([m for m in sys.argv[1:] if m in sys.modules]))\n"
    )
    found = output_of("-c", script + work, *heavy)
    assert found.splitlines()[-1] == "[]"
    assert ("2 kernels by " in found) == ("ls" in work)
