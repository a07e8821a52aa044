"""The examples of the documentation run, and print what the pages show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path

import click
import pytest
import torch

from cache_tools.cli import cli
from tests.doc_text import PAGES, ROOT, Block, blocks_of

NEEDS_A_GPU = "# needs a GPU\n"

BLOCKS = {page: blocks_of(path.read_text(encoding="utf-8")) for page, path in PAGES.items()}


def pages_with(language: str) -> list[str]:
    """Return the pages that have a block of ``language``."""
    return [page for page, blocks in BLOCKS.items() if language in {b.language for b in blocks}]


def python_of(page: str, *, with_gpu: bool) -> str:
    """Return the Python blocks of a page as one program, without those that need a GPU or not."""
    texts = [block.text for block in BLOCKS[page] if block.language == "python"]
    return "\n".join(text for text in texts if with_gpu or not text.startswith(NEEDS_A_GPU))


def run_program(program: str, *, hide_gpus: bool) -> list[str]:
    """Run ``program`` in a fresh interpreter, on the cache of this test; return what it printed."""
    changes = {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **changes}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def promised_by(program: str) -> list[str]:
    """Return what a program says that it prints, in comments behind its ``print`` lines."""
    return re.findall(r"^ *print\(.*\)  # (.+)$", program, re.MULTILINE)


# The reference shows signatures and fields in Python, which are no programs.
EXAMPLES = [page for page in pages_with("python") if page != "docs/reference/api.md"]


@pytest.mark.parametrize("page", [page for page in EXAMPLES if python_of(page, with_gpu=False)])
def test_python_examples_run_on_the_cpu(page: str) -> None:
    """The Python blocks of a page, one after the other, run and print what their comments say."""
    program = python_of(page, with_gpu=False)

    printed = run_program(program, hide_gpus=True)

    assert [line for line in promised_by(program) if line not in printed] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("page", EXAMPLES)
def test_python_examples_run_on_a_gpu(page: str) -> None:
    """With a GPU all blocks of a page run, those too that say that they need one."""
    program = python_of(page, with_gpu=True)

    printed = run_program(program, hide_gpus=False)

    assert [line for line in promised_by(program) if line not in printed] == []


@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_for_a_gpu_are_python(page: str) -> None:
    """What cannot run without a GPU is at least Python without a mistake of syntax."""
    program = python_of(page, with_gpu=True)

    assert compile(program, page, "exec") is not None


# What differs from machine to machine, from run to run and from one edit of a template to another.
UNSTABLE = (
    (r"\b(?:[0-9a-f]{64}|(?=[a-f]*\d)[0-9a-f]{8})\b", "KEY"),
    (r"(?:~|(?<![\w./])/[\w.-]+)(?:/[\w.+-]+)+", "FOLDER"),
    (r"\d{4}-\d\d-\d\dT[\d:+]+", "DATE"),
    (r"\b\d+(?:\.\d+)? (?:us|ms|s)\b", "TIME"),
    (r"\b\d+(?:\.\d+)? (?:B|KiB|MiB)(?!\w)", "SIZE"),
    (r"nvrtc-[\d.]+", "nvrtc-VERSION"),
    (r", on [\w.-]+, by", ", on HOST, by"),
    (r"(?<=tile_rows 16: )\d+", "COUNT"),
    (r"\d+(?= registers)", "COUNT"),
    (r"(?<=[a-f0-9\s])\d+ +(?=0 +SIZE)", "COUNT "),
    (r"\s+", " "),
)


def stable(line: str) -> str:
    """Return a line of output without what is nobody's promise."""
    for pattern, name in UNSTABLE:
        line = re.sub(pattern, name, line)
    return line.strip()


class Shell:
    """A shell where ``mlagen`` is this checkout's command, and shown keys stand for real ones."""

    def __init__(self, folder: Path) -> None:
        self.keys: dict[str, str] = {}
        script = folder / "mlagen"
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cache_tools "$@"\n')
        script.chmod(0o755)
        self.environ = {
            **os.environ,
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }

    def run(self, command: str, shown: list[str]) -> list[str]:
        """Run a command of a page; return what it printed, and learn the keys that it shows."""
        for key, real in self.keys.items():
            command = command.replace(key, real)
        run = subprocess.run(
            ["/bin/sh", "-c", f"{{ {command}; }} 2>&1"],
            env=self.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        printed = run.stdout.splitlines()
        for line in shown:
            keys = re.findall(UNSTABLE[0][0], line)
            like = [other for other in printed if stable(other) == stable(line)]
            if keys and len(like) == 1:
                self.keys |= zip(keys, re.findall(UNSTABLE[0][0], like[0]), strict=True)
        return printed


def sessions_of(block: Block) -> list[tuple[str, list[str]]]:
    """Return the commands of a console block, each with the lines that are shown below it."""
    sessions: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            sessions.append((line[2:], []))
        else:
            sessions[-1][1].append(line)
    return sessions


@pytest.mark.parametrize("page", pages_with("console"))
def test_shown_sessions_print_what_they_show(page: str, tmp_path: Path) -> None:
    """A session that is shown, run from its first line to its last, prints those lines.

    The order of lines and what ``stable`` leaves out may differ; ``...`` stands for any lines.
    """
    shell = Shell(tmp_path)
    consoles = [block for block in BLOCKS[page] if block.language == "console"]

    for command, shown in [session for block in consoles for session in sessions_of(block)]:
        printed = Counter(map(stable, shell.run(command, shown)))
        expected = Counter(stable(line) for line in shown if line != "...")

        assert expected - printed == Counter(), command
        assert "..." in shown or printed == expected, command


def commands_of(page: str) -> list[list[str]]:
    """Return the commands of the shell blocks of a page, without comments and variables."""
    texts = [block.text.replace("\\\n", " ") for block in BLOCKS[page] if block.language == "sh"]
    lines = [shlex.split(line, comments=True) for text in texts for line in text.splitlines()]
    return [list(dropwhile(lambda word: "=" in word, line)) for line in lines if line]


def problem_with(words: list[str]) -> str | None:
    """Return what is wrong with a command that a page tells a reader to run, or None."""
    name, *arguments = words
    if name == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return None if f"\n{arguments[0]}:" in makefile else f"no target {arguments[0]}"
    if name == "mlagen":
        return _problem_with_options(arguments)
    if name == "python3" and arguments[:2] == ["-m", "pytest"]:
        paths = [word for word in arguments[2:] if word.startswith("tests")]
        return next((f"no {path}" for path in paths if not (ROOT / path).exists()), None)
    if name == "pip" and arguments[0] == "install":
        extras = re.findall(r"\[(\w+)\]", arguments[-1])
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        return next((f"no extra {e}" for e in extras if f"\n{e} = [" not in project), None)
    return f"unknown command {name}"


def _problem_with_options(arguments: list[str]) -> str | None:
    command: click.Command = cli
    # Commands remember the name of --help from the first context that they meet: a proper one.
    above = click.Context(cli, info_name="mlagen", **cli.context_settings)
    while isinstance(command, click.Group) and arguments and arguments[0] in command.commands:
        command, arguments = command.commands[arguments[0]], arguments[1:]
    try:
        command.make_context("mlagen", list(arguments), parent=above)  # parses, and runs nothing
    except click.UsageError as error:
        return error.format_message()
    if isinstance(command, click.Group) and not arguments[0].startswith("-"):
        return f"no command {arguments[0]}"
    return None


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_that_pages_name_exist(page: str) -> None:
    """Targets of make, options of the command, extras of pip and test folders are real."""
    problems = {" ".join(words): problem_with(words) for words in commands_of(page)}

    assert {words: problem for words, problem in problems.items() if problem} == {}


def test_wrong_commands_are_found() -> None:
    """The check of commands knows what it is to find."""
    wrong = ("make cofee", "mlagen prewarm --archs x", "pip install .[cu11]", "mlagen cache lst")

    assert [line for line in wrong if problem_with(line.split()) is None] == []


def test_the_checkout_is_what_examples_run() -> None:
    """Examples import this checkout, whatever is installed."""
    found = find_spec("mlagen")

    assert found is not None
    assert found.origin == str(ROOT / "mlagen" / "__init__.py")
