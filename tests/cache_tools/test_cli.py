"""The command as a whole: name, options, imports, completion, pipes, terminals and locales."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import BashComplete

import mlagen
from cache_tools.cli import cli
from cache_tools.options.entry_options import age
from cache_tools.options.options import names, numbers
from cache_tools.tools.completion import completer
from mlagen.cache.store import kernel_store
from mlagen.values import INT32_MAX, shown
from tests.fixture_types import Patch
from tests.kernels import COMBINE

from .altered import fill
from .conftest import HEAVY, ROOT, Cached, on_a_terminal, raising, run, start


def output_of(*arguments: str) -> str:
    """Return the output of a Python process."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("words", "begin"),
    [("--version", f"mlagen {mlagen.__version__}\n"), ("-h", "Usage: mlagen [OPTIONS]")],
)
def test_the_module_is_the_command(words: str, begin: str) -> None:
    """`python3 -m cache_tools` is `mlagen`, and calls itself so; a group alone prints its help."""
    assert output_of("-m", "cache_tools", words).startswith(begin)
    for line in ("--help", "cache -h", "cache"):
        result = run(*line.split())
        assert (result.stdout + result.stderr).startswith("Usage: mlagen ")


AGES = {"90s": 90, "1.5 min": 90, "12h": 43_200, " 30d": 2_592_000, "2w": 1_209_600}
AGE, NUMBERS = "expected an age such as 90min", "expected numbers from 1 to 2147483647, with commas"


@pytest.mark.parametrize(
    ("parse", "parsed", "invalid", "message"),
    [
        (age, AGES, ["", "30", "d", "-1d", "1e3s", "1 month", "1d 2h"], AGE),
        (numbers(1), {"1,2147483647": [1, INT32_MAX]}, ["0", "1,big", "-1", ""], NUMBERS),
        (numbers(1), {}, ["2147483648", "64," + "9" * 5000], NUMBERS),
        (numbers(0), {"0,64": [0, 64]}, [], ""),
        (names, {"bf16, fp16": ["bf16", "fp16"]}, [], ""),
    ],
    ids=["ages", "numbers", "large numbers", "with zero", "names"],
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
        assert caught.value.message.endswith(f"got {shown(text)}")


def test_options_of_the_whole_command_override_variables(monkeypatch: Patch) -> None:
    """`--cache-dir` expands a tilde as the variable does, `-v` is MLAGEN_LOG=info, `-vv` debug."""
    monkeypatch.setenv("MLAGEN_LOG", "off")
    levels = {"-v": logging.INFO, "-vv": logging.DEBUG, "-vvv": logging.DEBUG}
    for folder, option in (("/other", "-v"), ("~/kernels", "-vv"), ("/", "-vvv")):
        chosen = run(f"--cache-dir {folder} {option} cache dir")
        assert (chosen.exit_code, chosen.stdout) == (0, f"{Path(folder).expanduser()}\n")
        assert logging.getLogger("mlagen").level == levels[option]


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


def completed(args: str, typed: str) -> dict[str, str | None]:
    """Return the completed values, with their help."""
    shell = BashComplete(cli, {}, "mlagen", "_MLAGEN_COMPLETE")
    return {item.value: item.help for item in shell.get_completions(args.split(), typed)}


@pytest.mark.parametrize(
    ("args", "typed", "expected"),
    [
        ("prewarm --model", "deepseek-r1", ["deepseek-r1", "deepseek-r1-zero"]),
        ("prewarm --model", "llama-3-8b,Kimi-K2", ["llama-3-8b,kimi-k2", "llama-3-8b,kimi-k2.5"]),
        ("prewarm --arch", "h1", ["H100"]),
        ("prewarm --arch", "sm_80,sm_90", ["sm_80,sm_90a"]),
        ("prewarm --arch", "na", ["native"]),
        ("prewarm --family", "comb", ["combine", "combine_states"]),
        ("cache ls --arch", "sm_9", ["sm_90a"]),
        ("cache ls --family", "comb", ["combine", "combine_states"]),
        ("cache show", "zz", []),
        ("kernel show", "foo(arch", []),
        ("kernel show --arch", "zz", []),
    ],
)
def test_values_are_completed_one_by_one(args: str, typed: str, expected: list[str]) -> None:
    """Text before the last comma stays, and an unknown value has no completion."""
    assert list(completed(args, typed)) == expected


@pytest.mark.parametrize("args", ["kernel show", "cache why", "prewarm --kernel"])
def test_a_spec_is_completed_in_two_steps(args: str) -> None:
    """The family comes first, and behind its opening bracket every spec that begins so."""
    assert list(completed(args, "mla_sm90_")) == ["mla_sm90_fp8", "mla_sm90_fp8kv"]
    assert str(COMBINE).replace("sm_80", "sm_90a") in completed(args, "combine(arch=sm_90a, d")


@pytest.mark.parametrize("words", ["show", "why", "rm 123456", "push URL", "export FILE"])
def test_a_key_is_completed_from_the_cache(words: str, cached: Cached) -> None:
    """A key is completed to eight digits, or one more than are typed, with its kernel as help."""
    (first, second), args = cached.keys, f"cache {words}"
    assert {first[:8], second[:8]} <= set(completed(args, ""))
    assert completed(args, first[:6]) == {first[:8]: "combine sm_80 bf16 dims 512"}
    assert list(completed(args, first[:20].upper())) == [first[:21]]


def test_a_completion_never_raises(monkeypatch: Patch) -> None:
    """A broken setting or cache completes nothing."""
    monkeypatch.setenv("MLAGEN_CACHE_MAX_SIZE", "none")
    parameter, context = click.Option(["--model"]), click.Context(cli)
    assert completed("cache show", "") == {}
    assert completer(raising(OSError()))(context, parameter, "") == []


LISTS = [("cache", "ls"), ("cache", "ls", "--json"), ("cache", "stats")]


HELPS = [("--help",), ("--version",), ("cache", "-h")]


@pytest.mark.parametrize("arguments", [*LISTS, ("cache", "verify"), *HELPS], ids=" ".join)
def test_a_closed_pipe_is_no_error(arguments: tuple[str, ...], cache_dir: Path) -> None:
    """A pipe closed before the first byte ends the command silently, as SIGPIPE does."""
    fill(cache_dir, 20)
    reading, writing = os.pipe()
    os.close(reading)

    process = start(*arguments, stdout=writing)
    os.close(writing)
    _, errors = process.communicate()
    assert process.returncode == 141
    assert errors in {"", "verifying 20 entries\n"}


@pytest.mark.parametrize(
    ("streams", "code"), [(("stderr",), 0), (("stdout", "stderr"), 141)], ids=["stderr", "both"]
)
@pytest.mark.usefixtures("cache_dir")
def test_work_goes_on_without_a_reader(streams: tuple[str, ...], code: int) -> None:
    """A closed stderr only silences progress: every kernel is compiled."""
    reading, writing = os.pipe()
    os.close(reading)

    options = "--arch sm_80 --family combine --dtype bf16 --kv-lora-rank 256,512"
    closed: dict[str, Any] = dict.fromkeys(streams, writing)
    process = start("prewarm", *options.split(), **closed)
    os.close(writing)
    process.communicate()
    assert process.returncode == code
    assert len(list(kernel_store().entries())) == 2


PREWARM = f"prewarm --kernel '{COMBINE}'"
NO_ANSWER = "no answer, nothing removed; --yes skips the question"
NO_TEXT, UTF_8 = r"printf '\377\n'", "PYTHONIOENCODING=utf-8:strict"
NO_SPACE = "mlagen: No space left on device\n"


@pytest.mark.parametrize(
    ("line", "code", "output", "error"),
    [
        (f"mlagen {PREWARM} 2>&-", 0, "1 kernel: 1 built", ""),
        (f"mlagen {PREWARM} 2>/dev/full", 0, "1 kernel: 1 built", ""),
        ("mlagen cache export k.tar.gz 2>&-", 0, "exported 2 kernels", ""),
        ("mlagen cache show abc 2>/dev/full", 2, "", ""),
        *((f"mlagen {' '.join(words)} >&-", 141, "", "") for words in (*LISTS, *HELPS)),
        *((f"mlagen {' '.join(words)} >/dev/full", 1, "", NO_SPACE) for words in HELPS),
        ("mlagen doctor >&- 2>&- <&-", 141, "", ""),
        ("mlagen cache clear <&-", 130, NO_ANSWER, "mlagen: interrupted\n"),
        ("mlagen prewarm - <&-", 2, "", "mlagen: -: expected a list of tables"),
        (f"{NO_TEXT} | {UTF_8} mlagen cache clear", 1, "nothing removed", ""),
    ],
    ids=lambda value: value.replace(PREWARM, "prewarm") if isinstance(value, str) else "",
)
def test_a_stream_that_is_closed_or_full_has_an_exit_code(
    line: str, code: int, output: str, error: str, cache_dir: Path, tmp_path: Path
) -> None:
    """Without stderr the work goes on, without a reader of stdout it ends as by SIGPIPE."""
    fill(cache_dir, 2)
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    shell = f"mlagen() {{ '{sys.executable}' -m cache_tools \"$@\"; }}; {line}"
    ran = subprocess.run(
        ["/bin/sh", "-c", shell],
        check=False,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, output in ran.stdout) == (code, True)
    assert ran.stderr.startswith(error) if error else ran.stderr == ""
    assert ran.stderr.count("\n") <= 1


def test_the_first_line_of_a_long_list_can_be_taken(cache_dir: Path) -> None:
    """`mlagen cache ls | head -1` prints the column names, and nothing on stderr."""
    fill(cache_dir, 2000)
    command = ["/bin/sh", "-c", f"'{sys.executable}' -m cache_tools cache ls | head -1"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("key  ")
    assert (ran.stdout.count("\n"), ran.stderr) == (1, "")


@pytest.mark.parametrize("arguments", [("cache", "dir"), *LISTS[:2]], ids=" ".join)
@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "latin-1"},
    ],
    ids=["ASCII", "Latin-1"],
)
def test_any_path_can_be_printed_in_any_locale(
    environment: dict[str, str], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """Characters outside of the locale, and bytes that are no text, are escaped; JSON is ASCII."""
    folder = tmp_path / os.fsdecode(b"h\xc3\xa4user \xe2\x98\x83, no text \xff")
    fill(folder, 1)

    environ = os.environ | {**environment, "MLAGEN_CACHE_DIR": str(folder)}
    process = start(*arguments, env=environ, text=False)
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, b"")
    if arguments == ("cache", "dir"):
        assert output == os.fsencode(folder) + b"\n"
    elif "--json" in arguments:
        printed = json.loads(output.decode("ascii"))["cache_dir"]
        assert os.fsencode(printed) == os.fsencode(folder)
    else:
        assert os.fsencode(tmp_path) in output


@pytest.mark.parametrize(
    "environment",
    [{"NO_COLOR": "1"}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}, {"TERM": "dumb"}],
    ids=["NO_COLOR", "FORCE_COLOR", "dumb terminal"],
)
def test_nothing_is_colored(environment: dict[str, str], cache_dir: Path) -> None:
    """The output has no escape sequences, on a terminal or elsewhere."""
    fill(cache_dir, 2)
    code, shown = on_a_terminal(*LISTS[0], **environment)
    piped, _ = start(*LISTS[0], env=os.environ | environment).communicate()
    assert code == 0
    for text in (shown, piped):
        assert text.strip()
        assert "\x1b" not in text
