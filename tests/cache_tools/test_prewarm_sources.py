"""Kernel sources of `mlagen prewarm`: models, texts, records and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cache_tools.options.selection_options import selection_options
from mlagen.paths import MAX_NAMED_BYTES
from mlagen.prewarming.spec_file import KEYS
from tests.kernels import COMBINE

from .conftest import Run

LINE = json.dumps({"kernel": str(COMBINE)}) + "\n"
TABLE = '[[kernel]]\nfamily = "combine"\ndtype = "bf16"\nkv_lora_rank = 512\n'


def kernels(run: Run, *arguments: str, answer: str | None = None) -> list[str]:
    """Return the kernels of a dry run."""
    result = run("prewarm", "--dry-run", "--json", *arguments, answer=answer)
    assert result.exit_code == 1, result.stderr  # nothing is cached
    named = []
    for unit in json.loads(result.stdout)["units"]:
        values = ", ".join(f"{name}={value}" for name, value in unit["spec"].items())
        named.append(f"{unit['family']}({values})")
    return named


def test_a_model_is_prewarmed_by_its_name(run: Run) -> None:
    """A model name selects kernels per architecture, tensor-parallel size and dtype."""
    named = kernels(
        run,
        *("--arch", "sm_80,sm_90a", "--model", "kimi-k2", "--tp", "1,8"),
        *("--kv-dtype", "bf16,e4m3", "--q-len", "1,2", "--page-size", "64"),
    )

    families = [name.partition("(")[0] for name in named]
    assert {name: families.count(name) for name in families} == {
        "mla_sm80": 12,
        "mla_sm90": 2,
        "mla_sm90_fp8": 3,
        "mla_sm90_fp8kv": 6,
        "combine": 2,
    }


def test_a_kernel_is_prewarmed_by_its_text(run: Run) -> None:
    """--kernel selects one kernel, and needs no --arch."""
    assert kernels(run, "--kernel", str(COMBINE), "--kernel", str(COMBINE)) == [str(COMBINE)]


def test_a_record_is_prewarmed_for_its_own_architecture_or_for_others(
    run: Run, tmp_path: Path
) -> None:
    """Several records are merged, for their architecture or that of --arch."""
    log = tmp_path / "a.jsonl"
    log.write_text(LINE * 2)

    here = kernels(run, "--from-log", str(log), "--from-log", str(log))
    elsewhere = kernels(run, "--from-log", str(log), "--arch", "sm_90a,sm_86")

    assert here == [str(COMBINE)]
    assert elsewhere == [str(COMBINE).replace("sm_80", arch) for arch in ("sm_90a", "sm_86")]


@pytest.mark.parametrize("place", ["a file", "standard input"])
def test_tables_are_prewarmed(place: str, run: Run, tmp_path: Path) -> None:
    """Files and stdin select kernels for the architectures of the command."""
    path = tmp_path / "kernels.toml"
    path.write_text(TABLE)
    file, answer = (str(path), None) if place == "a file" else ("-", TABLE)

    assert kernels(run, file, "--arch", "sm_80", answer=answer) == [str(COMBINE)]


def test_all_of_them_together_are_prewarmed_once(run: Run, tmp_path: Path) -> None:
    """A kernel from several sources is one unit."""
    log, path = tmp_path / "a.jsonl", tmp_path / "a.json"
    log.write_text(LINE)
    path.write_text(json.dumps({"kernel": [{"kernel": str(COMBINE)}]}))

    named = kernels(
        run,
        *(str(path), "--kernel", str(COMBINE), "--from-log", str(log)),
        *("--model", "deepseek-v3", "--tp", "8", "--arch", "sm_80"),
    )

    assert [name.partition("(")[0] for name in named] == ["combine", "mla_sm80"]


@pytest.mark.parametrize(
    ("name", "content", "option", "message"),
    [
        ("a.toml", "[[kernel]]\nx = 1", (), "{}: kernel 1: expected keys out of "),
        ("a.json", "[]", (), "{}: expected a list of tables "),
        ("a.jsonl", f"{LINE}x\n", ("--from-log",), "{}:2: expected a record such as "),
    ],
    ids=["TOML", "JSON", "record"],
)
def test_a_mistake_in_a_file_exits_with_2_and_its_place(
    name: str, content: str, option: tuple[str, ...], message: str, run: Run, tmp_path: Path
) -> None:
    """The message has the file, and the table or line."""
    path = tmp_path / name
    path.write_text(content)

    result = run("prewarm", *option, str(path), "--arch", "sm_80")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"mlagen: {message.format(path)}")


def test_tables_have_the_names_of_the_options() -> None:
    """A table accepts every selection option; a record is a file of its own."""

    @selection_options
    def command() -> None:
        pass

    options = [option.opts[0] for option in command.__click_params__]  # type: ignore[attr-defined]
    names = {option.removeprefix("--").replace("-", "_") for option in options}
    assert names == {*KEYS, "from_log"}


@pytest.mark.timeout(15)
@pytest.mark.parametrize("source", ["--from-log", "--model", "file", "standard input"])
def test_a_source_without_an_end_is_rejected(source: str, run: Run, tmp_path: Path) -> None:
    """A device takes no memory, a FIFO no wait; the exit code is 2."""
    endless = tmp_path / "endless.toml"
    if source == "standard input":
        result = run("prewarm", "-", "--arch", "sm_80", answer="#" * (MAX_NAMED_BYTES + 1))
    else:
        endless.symlink_to("/dev/zero")
        option = [] if source == "file" else [source]
        result = run("prewarm", *option, str(endless), "--arch", "sm_80")

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    got = "64 MiB" if source == "standard input" else "a device"
    assert f"got {got}" in result.stderr or f"at most {got}" in result.stderr
