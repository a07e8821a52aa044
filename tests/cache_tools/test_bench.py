"""`mlagen bench`: options, output, and exit codes, with a machine that knows the answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

from cache_tools.benchmark.outcomes import FIELDS
from cache_tools.benchmark.selection import USUAL
from cache_tools.cli import cli
from cache_tools.commands import bench
from mlagen.runtime import device
from mlagen.runtime.device import DeviceFacts
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine

from .conftest import Run, Start

TINY = ("bench", "--batch", "2", "--seq-len", "64", "--heads", "16")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeMachine], list[str | None]]:
    """Return a function that lets the command measure on a machine; it gives what was asked."""

    def use_it(machine: FakeMachine) -> list[str | None]:
        backends: list[str | None] = []

        def make(backend: str | None) -> FakeMachine:
            backends.append(backend)
            return machine

        monkeypatch.setattr(bench, "_machine", make)
        return backends

    return use_it


Use = Callable[[FakeMachine], list[str | None]]


def test_json_is_the_documented_document(run: Run, use: Use) -> None:
    """With --json, stdout is one document with the documented names, and people read stderr."""
    use(FakeMachine())

    result = run(*TINY, "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert list(document) == list(FIELDS["the document"])
    assert [case["case"] for case in document["cases"]] == ["mla bf16, 2 x 64, 16 heads"]
    assert result.stderr == (
        "read 4000 GB/s, products of bf16 800 TFLOP/s\n   1000.0 us  mla bf16, 2 x 64, 16 heads\n"
    )


def test_people_get_a_table(run: Run, use: Use) -> None:
    """The usual cases, a row each."""
    use(FakeMachine())

    result = run("bench")

    assert result.exit_code == 0
    assert result.stdout.startswith("NVIDIA H200, ")
    assert len(result.stdout.splitlines()) == 3 + 9


def test_options_reach_the_cases(run: Run, use: Use) -> None:
    """Lists are split at commas, and every option is one of the case."""
    machine = FakeMachine()
    use(machine)

    result = run(
        *("bench", "--family", "gqa", "--batch", "1,2", "--seq-len", "100", "--heads", "8"),
        *("--kv-heads", "2", "--head-dim", "64", "--q-len", "3", "--page-size", "16"),
        *("--dtype", "fp16", "--kv-dtype", "e4m3", "--ragged"),
    )

    assert result.exit_code == 0
    rest = "8/2 heads, head_dim 64, q_len 3, page_size 16"
    assert machine.asked == [
        "ceilings",
        f"gqa fp16/e4m3, 1 x ~100, {rest}",
        f"gqa fp16/e4m3, 2 x ~100, {rest}",
    ]


@pytest.mark.parametrize("option", USUAL["gqa"])  # which has all that MLA has
def test_help_has_the_default_that_counts(option: str) -> None:
    """What is written beside an option is what a case has without it."""
    (found,) = [each for each in cli.commands["bench"].params if each.name == option]
    assert isinstance(found, click.Option)
    defaults = {str(facts[option] or "as the query") for facts in USUAL.values() if option in facts}

    _, _, written = (found.help or "").partition("default: ")

    assert set(written.rstrip(".").split(", of GQA ")) == defaults


@pytest.mark.parametrize(
    ("machine", "code"),
    [
        (FakeMachine(lambda _: WRONG), 1),
        (FakeMachine(lambda _: FAILED), 1),
        (FakeMachine(lambda _: RIGHT, lambda _: FAILED), 0),
    ],
    ids=["wrong", "failed", "only FlashInfer failed"],
)
def test_a_wrong_or_missing_result_exits_with_1(
    machine: FakeMachine, code: int, run: Run, use: Use
) -> None:
    """The document is printed all the same, and stderr says which case and why."""
    use(machine)

    result = run(*TINY, "--json")

    (case,) = json.loads(result.stdout)["cases"]
    assert result.exit_code == code
    problem = case["flashinfer"] or case["mlagen"]
    assert result.stderr.splitlines()[-1].startswith(
        f"{'mlagen' if code else 'flashinfer'}: mla bf16, 2 x 64, 16 heads: "
    )
    assert (problem["problem"] or "relative error: ") in result.stderr


def test_a_plot_is_written_beside_the_table(run: Run, use: Use, tmp_path: Path) -> None:
    """The file is named on stderr."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra `bench`")
    use(FakeMachine())
    path = tmp_path / "roofline.png"

    result = run(*TINY, "--plot", str(path))

    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert result.stderr.endswith(f"roofline: {path}\n")


@pytest.mark.parametrize(
    ("options", "backend"),
    [((), None), (("--compare",), "auto"), (("--compare", "--backend", "fa3"), "fa3")],
    ids=["alone", "beside FlashInfer", "with a backend of it"],
)
def test_flashinfer_is_measured_where_it_is_asked_for(
    options: tuple[str, ...],
    backend: str | None,
    run: Run,
    use: Use,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend is the one that is named."""
    monkeypatch.setattr(bench, "find_spec", lambda _name: object())
    backends = use(FakeMachine())

    run(*TINY, *options)

    assert backends == [backend]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--family", "mha"), 2, "family: expected mla or gqa, got mha"),
        (("--backend", "fa3"), 2, "backend: expected compare beside it, got fa3"),
        (("--plot", "a.pdf"), 2, "plot: expected a name that ends in .png, got a.pdf"),
        (
            ("--plot", "a.png"),
            3,
            "plot: expected matplotlib to be installed, got none; run: pip install matplotlib",
        ),
        (
            ("--compare",),
            3,
            (
                "compare: expected FlashInfer to be installed, got none; "
                "run: pip install flashinfer-python, or leave --compare out"
            ),
        ),
    ],
    ids=["a family", "a backend of nothing", "a format", "no matplotlib", "no FlashInfer"],
)
def test_what_cannot_be_is_told_before_anything_is_measured(
    options: tuple[str, ...],
    code: int,
    message: str,
    run: Run,
    use: Use,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line on stderr, an exit code, and no work."""
    backends = use(FakeMachine())
    for name in ("matplotlib", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)

    result = run("bench", *options)

    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"mlagen: {message}\n")
    assert backends == []


def test_without_a_gpu_nothing_is_loaded(start: Start) -> None:
    """The command says what it lacks and exits with 3, before torch is imported."""
    process = start("bench", without=("torch", "cuda"))

    out, errors = process.communicate(timeout=60)

    assert (process.returncode, out) == (3, "")
    assert errors == "mlagen: device: expected a GPU to measure, got none\n"


def _visible(major: int, minor: int) -> list[DeviceFacts]:
    facts = {"index": 0, "sm_count": 132, "memory_bytes": 1 << 36}
    return [DeviceFacts(name="a GPU", major=major, minor=minor, **facts)]


def test_a_gpu_that_torch_does_not_see_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch for the CPU cannot measure on a GPU."""
    monkeypatch.setattr(device, "visible_devices", lambda: _visible(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    result = run("bench")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"mlagen: torch: expected a build for CUDA that sees the GPU, got {torch.__version__}\n"
    )


def test_a_gpu_that_no_kernel_is_made_for_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names what it has to be."""
    monkeypatch.setattr(device, "visible_devices", lambda: _visible(7, 5))

    result = run("bench")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mlagen: device: expected compute capability ")
