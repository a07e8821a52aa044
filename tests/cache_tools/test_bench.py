"""`mlagen bench`: options, output and exit codes, with a fake machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch

from cache_tools.benchmark.outcomes import Outcome
from cache_tools.benchmark.selection import DEFAULTS
from cache_tools.cli import cli
from cache_tools.commands import bench
from mlagen.runtime import device
from mlagen.runtime.device import DeviceFacts
from tests.fake_machine import FAILED, RIGHT, WRONG, FakeMachine
from tests.fixture_types import Patch

from .conftest import run, start, without

TINY = "bench --batch 2 --seq-len 64 --heads 16"
Use = Callable[[FakeMachine], list[object]]


@pytest.fixture
def use(monkeypatch: Patch) -> Use:
    """Return a function that installs a fake machine, and returns the record of its calls."""

    def use_it(machine: FakeMachine) -> list[object]:
        compared: list[object] = []

        def make(compare: list[str] | None, libraries: Path | None) -> FakeMachine:
            compared.append((compare, libraries))
            return machine

        monkeypatch.setattr(bench, "_machine", make)
        return compared

    return use_it


GQA = (
    "bench --family gqa --batch 1,2 --seq-len 100 --heads 8 --kv-heads 2 --head-dim 64 --q-len 3 "
    "--page-size 16 --dtype fp16 --kv-dtype e4m3 --ragged --window-left 9 --mode sustained"
)
REST = "x ~100, 8/2 heads, head_dim 64, window_left 9, q_len 3, page_size 16, sustained"
BOTH = ["flashmla", "fa3"]


@pytest.mark.parametrize(
    ("line", "cases", "compared"),
    [
        (GQA, [f"gqa fp16/e4m3, {batch} {REST}" for batch in (1, 2)], (None, None)),
        (
            rf"{TINY} --qk-rope-head-dim 0,64 --top-k 32 --filter 512\+0 --compare",
            ["mla bf16, 2 x 64, 16 heads, dims 512+0, top-k 32, fresh"],
            (["all"], None),
        ),
        (
            "bench --suite full --filter ^gqa.*int8 --compare flashmla,fa3 --libraries site",
            ["gqa bf16/int8, 128 x 4096, 64/8 heads, fresh"],
            (BOTH, Path("site")),
        ),
    ],
    ids=["gqa", "mla, a filter", "a suite"],
)
def test_options_reach_the_cases(line: str, cases: list[str], compared: object, use: Use) -> None:
    """Values are split at commas, --filter is a regex, and --compare alone means all libraries."""
    machine = FakeMachine()
    libraries = use(machine)
    assert run(line).exit_code == 0
    assert (machine.calls, libraries) == (["ceilings", *cases], [compared])


@pytest.mark.parametrize("option", list(dict.fromkeys(DEFAULTS["mla"]) | DEFAULTS["gqa"]))
def test_help_shows_the_actual_defaults(option: str) -> None:
    """The default in the help of an option is the value of a case without it."""
    (found,) = [each for each in cli.commands["bench"].params if each.name == option]
    assert isinstance(found, click.Option)
    values = [facts[option] for facts in DEFAULTS.values() if option in facts]
    words = {None: "that of the query", -1: "all"}
    defaults = {str(words.get(value, value)) for value in values}
    _, _, written = (found.help or "").partition("default: ")
    assert set(written.rstrip(".").split(", for GQA ")) == defaults


ONE_WRONG = FakeMachine(lambda case: WRONG if case.heads == 16 else RIGHT)


@pytest.mark.parametrize(
    ("machine", "code", "problem"),
    [
        (ONE_WRONG, 1, "mlagen: {}: relative error: "),
        (FakeMachine(lambda _: FAILED), 1, "mlagen: {}: RuntimeError: no memory"),
        (FakeMachine(lambda _: RIGHT, lambda _: FAILED), 0, "fa3: {}: RuntimeError: no memory"),
    ],
    ids=["wrong", "failed", "only the baseline failed"],
)
def test_a_wrong_or_missing_result_exits_with_1(
    machine: FakeMachine, code: int, problem: str, use: Use
) -> None:
    """The document is still printed, and stderr names the case and the reason."""
    use(machine)
    result = run(TINY, "--heads", "16,32", "--json")
    assert (result.exit_code, len(json.loads(result.stdout)["cases"])) == (code, 2)
    assert f"\n{problem.format('mla bf16, 2 x 64, 16 heads')}" in result.stderr


def test_a_plot_is_written_beside_the_table(use: Use, tmp_path: Path) -> None:
    """The file of the plot is named on stderr."""
    pytest.importorskip("matplotlib", reason="needs matplotlib, of the extra `bench`")
    use(FakeMachine())
    path = tmp_path / "bars.png"
    assert run(TINY, "--plot", str(path)).stderr.endswith(f"plot: {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_earlier_results_are_shown_and_compared(use: Use, tmp_path: Path) -> None:
    """--from-json measures nothing; a case slower than --baseline beyond the tolerance fails."""
    use(FakeMachine())
    results = str(tmp_path / "results.json")
    Path(results).write_text(run(TINY, "--mode", "fresh,model", "--json").stdout)
    both = run("bench --from-json", results)
    one = run("bench --from-json", results, "--mode", "model", "--json")
    assert (both.exit_code, len(both.stdout.splitlines())) == (0, 3 + 2 + 2)
    assert [row["mode"] for row in json.loads(one.stdout)["cases"]] == ["model"]

    use(FakeMachine(lambda _: Outcome(us=1040.0, error=1e-3)))
    strict, lenient = (run(TINY, "--baseline", results, *o) for o in ((), ("--tolerance", "5%")))
    assert (strict.exit_code, lenient.exit_code) == (1, 0)
    assert strict.stdout.splitlines()[1].split()[-4:] == ["1000.0", "1040.0", "+4.0%", "slower"]
    slower = "slower: mla bf16, 2 x 64, 16 heads, fresh: 1040.0 us, 1000.0 us before"
    assert strict.stderr.splitlines()[-1] == slower


@pytest.mark.parametrize(
    ("major", "minor", "code", "message"),
    [
        (9, 0, 3, "torch: expected a CUDA build that detects the GPU, got "),
        (7, 5, 2, "device: expected compute capability "),
    ],
    ids=["torch does not detect it", "not supported"],
)
def test_a_gpu_that_cannot_be_measured_is_reported(
    major: int, minor: int, code: int, message: str, monkeypatch: Patch
) -> None:
    """A CPU build of torch, or a GPU without a target, has no result."""
    facts = {"index": 0, "name": "a GPU", "sm_count": 132, "memory_bytes": 1 << 36}
    gpu = DeviceFacts(major=major, minor=minor, **facts)  # type: ignore[arg-type]
    monkeypatch.setattr(device, "visible_devices", lambda: [gpu])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("bench")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"mlagen: {message}")


def test_without_a_gpu_nothing_is_loaded() -> None:
    """Without a GPU the command exits with 3 before torch is imported."""
    process = start("bench", before=without("torch", "cuda"))
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert errors.startswith("mlagen: device: expected a GPU to measure, got none; ")
