"""`mlagen bench`: options, output and exit codes, with a fake machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

from cache_tools.benchmark.outcomes import FIELDS
from cache_tools.benchmark.selection import DEFAULTS
from cache_tools.cli import cli
from cache_tools.commands import bench
from mlagen.runtime import device
from mlagen.runtime.device import DeviceFacts
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine

from .conftest import Run, Start

TINY = ("bench", "--batch", "2", "--seq-len", "64", "--heads", "16")


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeMachine], list[str | None]]:
    """Return a function that installs a fake machine, and returns the record of its calls."""

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
    """With --json, stdout is one document with the documented names; the table is on stderr."""
    use(FakeMachine())

    result = run(*TINY, "--json")

    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert list(document) == list(FIELDS["the document"])
    assert [case["case"] for case in document["cases"]] == ["mla bf16, 2 x 64, 16 heads"]
    assert result.stderr == (
        "read 4000 GB/s, GEMM bf16 800 TFLOP/s\n   1000.0 us  mla bf16, 2 x 64, 16 heads\n"
    )


def test_the_default_output_is_a_table(run: Run, use: Use) -> None:
    """The default cases print one row each."""
    use(FakeMachine())

    result = run("bench")

    assert result.exit_code == 0
    assert result.stdout.startswith("NVIDIA H200, ")
    assert len(result.stdout.splitlines()) == 3 + 9


def test_options_reach_the_cases(run: Run, use: Use) -> None:
    """Values are split at commas, and every option sets a field of the case."""
    machine = FakeMachine()
    use(machine)

    result = run(
        *("bench", "--family", "gqa", "--batch", "1,2", "--seq-len", "100", "--heads", "8"),
        *("--kv-heads", "2", "--head-dim", "64", "--q-len", "3", "--page-size", "16"),
        *("--dtype", "fp16", "--kv-dtype", "e4m3", "--ragged"),
    )

    assert result.exit_code == 0
    rest = "8/2 heads, head_dim 64, q_len 3, page_size 16"
    assert machine.calls == [
        "ceilings",
        f"gqa fp16/e4m3, 1 x ~100, {rest}",
        f"gqa fp16/e4m3, 2 x ~100, {rest}",
    ]


@pytest.mark.parametrize("option", DEFAULTS["gqa"])  # a superset of MLA's
def test_help_shows_the_actual_defaults(option: str) -> None:
    """The default in the help of an option is the value of a case without it."""
    (found,) = [each for each in cli.commands["bench"].params if each.name == option]
    assert isinstance(found, click.Option)
    values = [facts[option] for facts in DEFAULTS.values() if option in facts]
    defaults = {str(value or "that of the query") for value in values}

    _, _, written = (found.help or "").partition("default: ")

    assert set(written.rstrip(".").split(", for GQA ")) == defaults


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
    """The document is still printed, and stderr names the case and the reason."""
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
    """The file of the plot is named on stderr."""
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
    ids=["alone", "with FlashInfer", "with its backend"],
)
def test_flashinfer_is_measured_on_request(
    options: tuple[str, ...],
    backend: str | None,
    run: Run,
    use: Use,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--compare measures FlashInfer with the named backend."""
    monkeypatch.setattr(bench, "find_spec", lambda _name: object())
    backends = use(FakeMachine())

    run(*TINY, *options)

    assert backends == [backend]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--family", "mha"), 2, "family: expected mla or gqa, got mha"),
        (("--backend", "fa3"), 2, "backend: expected --compare with it, got fa3"),
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
                "run: pip install flashinfer-python, or omit --compare"
            ),
        ),
    ],
    ids=["a family", "a backend of nothing", "a format", "no matplotlib", "no FlashInfer"],
)
def test_invalid_options_fail_before_any_measurement(
    options: tuple[str, ...],
    code: int,
    message: str,
    run: Run,
    use: Use,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An invalid option is one line on stderr and an exit code, without work."""
    backends = use(FakeMachine())
    for name in ("matplotlib", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)

    result = run("bench", *options)

    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"mlagen: {message}\n")
    assert backends == []


def test_without_a_gpu_nothing_is_loaded(start: Start) -> None:
    """Without a GPU the command exits with 3 before torch is imported."""
    process = start("bench", without=("torch", "cuda"))

    out, errors = process.communicate(timeout=60)

    assert (process.returncode, out) == (3, "")
    assert errors == "mlagen: device: expected a GPU to measure, got none\n"


def _visible(major: int, minor: int) -> list[DeviceFacts]:
    facts = {"index": 0, "sm_count": 132, "memory_bytes": 1 << 36}
    return [DeviceFacts(name="a GPU", major=major, minor=minor, **facts)]


def test_a_gpu_that_torch_does_not_detect_is_reported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU build of torch cannot measure on a GPU."""
    monkeypatch.setattr(device, "visible_devices", lambda: _visible(9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    result = run("bench")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == (
        f"mlagen: torch: expected a CUDA build that detects the GPU, got {torch.__version__}\n"
    )


def test_an_unsupported_gpu_is_reported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the supported architectures."""
    monkeypatch.setattr(device, "visible_devices", lambda: _visible(7, 5))

    result = run("bench")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mlagen: device: expected compute capability ")
