"""`mlagen replay`: dumped calls run again, on CPU tensors where there is no GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import mlagen
from cache_tools.replay import run as replaying
from cache_tools.replay.contents import fill
from cache_tools.replay.document import read_dump
from cache_tools.replay.rebuild import Rebuilt
from mlagen.errors import ArgumentError
from mlagen.observe.observed import observed
from tests.cache_tools.conftest import run, start, without
from tests.fixture_types import Patch
from tests.observed_calls import BUILDERS, built, observe
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase
from tests.problems.mla import KINDS, MlaCase, mla_case


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: Patch) -> None:
    """Replay on CPU tensors, on a machine with a GPU too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(monkeypatch: Patch, tmp_path: Path) -> Path:
    """Request dumps in a folder."""
    folder = tmp_path / "dumps"
    observe(monkeypatch, MLAGEN_DUMP=str(folder))
    return folder


@pytest.fixture
def dumped(folder: Path) -> Path:
    """Return the dump of a call."""
    function, arguments = built("trtllm")
    function(**arguments)
    return last_of(folder)


def last_of(folder: Path) -> Path:
    """Return the file of the last call."""
    return max(folder.glob("*.json"), key=lambda path: path.stem[-4:])


def as_if_on_gpu(path: Path) -> None:
    """Edit a dump: its tensors were on a GPU, so it has no values; its call checked contents."""
    set_variable(path, "MLAGEN_CHECK", "1")
    text = re.sub(r', "values": \[[^]]*\]', "", path.read_text(encoding="utf-8"))
    path.write_text(text.replace('"device": "cpu"', '"device": "cuda:0"'))


def set_variable(path: Path, name: str, value: str) -> None:
    """Edit a dump: its process had a variable."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["environment"][name] = value
    path.write_text(json.dumps(data), encoding="utf-8")


TWO: dict[str, Any] = {"name": "", "seq_lens": (37, 9)}
XQA = {
    "several tokens, a mask": GqaCase(**TWO, q_len=3, mask="random"),
    "ragged": GqaCase(name="", seq_lens=(37, 9, 5), q_lens=(1, 3, 2)),
    "heads first, fp4": GqaCase(**TWO, kv="nvfp4", layout="HND"),
    "int8": GqaCase(**TWO, kv="int8"),
}
STACKED = GqaCase(**TWO, cache_layout="stacked", window=8, sink=1.0)
SMALL: dict[str, Any] = {"name": "", "seq_lens": (40, 9), "heads": 2}
MLA = {
    **{
        kind: mla_case(kind, name=kind, seq_lens=(40, 3), page_size=8, heads=2)
        for kind in KINDS
        if ("over" not in kind and kind != "fp8_per_token") or kind.endswith("fp8_ds_mla")
    },
    "ragged": MlaCase(name="", seq_lens=(40, 9, 5), q_lens=(2, 0, 3), heads=2),
    "no rope": MlaCase(**SMALL, qk_rope_head_dim=0),
    "fp8_ds_mla, no rope": mla_case("bf16 over fp8_ds_mla", **SMALL, qk_rope_head_dim=0),
    "sparse": MlaCase(**SMALL, top_k=16, q_len=2),
    "values of other pages": MlaCase(**SMALL, values="other pages"),
}
CASES: dict[str, dict[str, Any]] = {
    "trtllm_gqa": {"HND": GqaCase(**TWO, layout="HND", kv_heads=3)},
    "trtllm": MLA,
    "xqa_batch": {**XQA, "one tensor, a window, a sink": STACKED},
    "xqa": XQA,
}
Call = tuple[Callable[..., Any], dict[str, Any]]


def of_case(name: str, case: Any) -> Call:
    """Return the observed call of an entry point for a case."""
    entry = ENTRY_POINTS[name]
    return observed(entry.function), entry.arguments(case.build("cpu"))


CALLS: Mapping[str, Callable[[], Call]] = {name: partial(built, name) for name in BUILDERS} | {
    f"{entry}: {name}": partial(of_case, entry, case)
    for entry, cases in CASES.items()
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CALLS)
def test_any_call_is_replayed(name: str, folder: Path) -> None:
    """Random contents of any layout, dtype, lengths and indices pass the checks of contents."""
    function, arguments = CALLS[name]()
    function(**arguments)
    path = last_of(folder)
    as_if_on_gpu(path)

    found = run.json("replay", str(path), "--seed", "3", code=3)

    has_result = name not in {"constructor", "plan", "dense_plan", "plan_decode"}
    assert found["served_by"] == (["CPU backend"] if has_result else [])
    assert (found["device"], found["contents"], found["seed"]) == ("cpu", "random", 3)
    assert found["is_right"] is None


@pytest.mark.parametrize("name", ["trtllm", "xqa", "run", "planless", "masks", "paged_flare"])
def test_dumped_tensors_are_rebuilt(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    """Contents, strides and offsets are those of the call, and the result is the same."""
    observe(monkeypatch, MLAGEN_DUMP=str(tmp_path), MLAGEN_DUMP_TENSORS="1")
    function, arguments = built(name)
    expected = function(**arguments)
    dump = read_dump(last_of(tmp_path))
    cpu = torch.device("cpu")

    rebuilt = {part: Rebuilt(of, cpu) for part, of in dump.parts.items()}
    fill(dump, rebuilt, seed=0)
    outputs, _, problem = replaying._run(dump.entry, rebuilt, cpu)

    assert problem is None
    for key, tensor in arguments.items():
        again = rebuilt["call"].arguments.get(key)
        if isinstance(tensor, torch.Tensor) and isinstance(again, torch.Tensor):
            assert again.stride() == tensor.stride()
    results = arguments["output"] if expected is None else expected
    likes = results if isinstance(results, tuple) else (results,)
    for out, like in zip(outputs, likes, strict=True):
        assert torch.equal(out.view(torch.uint8), like.view(torch.uint8))


def test_views_of_one_tensor_share_memory_again(folder: Path) -> None:
    """Latent and rope part of one cache stay interleaved; a broadcast query stays so."""
    function, arguments = built("planless")
    whole = torch.zeros(1, 8, 576, dtype=torch.bfloat16)
    query = torch.zeros(1, 2, 512, dtype=torch.bfloat16).expand(2, 2, 512)
    parts = {"ckv_cache": whole[..., :512], "kpe_cache": whole[..., 512:]}
    function(**{**arguments, **parts, "q_nope": query})
    dump = read_dump(last_of(folder))

    rebuilt = {part: Rebuilt(of, torch.device("cpu")) for part, of in dump.parts.items()}
    fill(dump, rebuilt, seed=0)

    given = rebuilt["call"].arguments
    latent, rope = given["ckv_cache"], given["kpe_cache"]
    assert rope.data_ptr() == latent.data_ptr() + 1024
    assert latent.stride() == rope.stride() == whole.stride()
    assert given["q_nope"].stride() == query.stride()
    assert bool(latent.any())
    assert bool(rope.any())


def test_a_call_on_a_gpu_is_not_compared_without_one(dumped: Path) -> None:
    """The text has the seed, and says that the kernels did not run; the exit code is 3."""
    as_if_on_gpu(dumped)
    result = run("replay", str(dumped), "--seed", "3")
    assert result.exit_code == 3
    assert "CPU tensors, as there is no GPU here, random contents of seed 3\n" in result.stdout
    assert "relative error  none: the kernels did not run\n" in result.stdout
    assert result.stdout.endswith("\nnothing compared: the call was on a GPU\n")


def test_a_missing_numpy_causes_no_warning(dumped: Path) -> None:
    """The NumPy warning of torch is suppressed: no command uses NumPy."""
    _, errors = start("replay", str(dumped), before=without("numpy")).communicate(timeout=100)
    assert errors == ""


@pytest.mark.parametrize("wrong", ["shape", "freed memory"])
def test_a_call_that_raised_raises_again(wrong: str, folder: Path) -> None:
    """The exit code is 1, and the text has both errors; without the GPU of the call too."""
    function, arguments = built("trtllm")
    if wrong == "shape":
        arguments["query"] = arguments["query"][..., :100]
    else:
        arguments["kv_cache"].untyped_storage().resize_(0)
    with pytest.raises(ArgumentError) as caught:
        function(**arguments)
    path = last_of(folder)
    if wrong == "shape":
        as_if_on_gpu(path)
    result, found = run("replay", str(path)), run.json("replay", str(path), code=1)

    assert result.exit_code == 1
    assert found["error"] == found["dumped"]["error"] == f"ArgumentError: {caught.value}"
    assert result.stdout.count(found["error"]) == 2
    assert "relative error  none: the call raised\n" in result.stdout


def test_the_kernel_settings_of_the_dumped_process_apply(dumped: Path) -> None:
    """An invalid one is the error of the replay; afterwards the own settings are back."""
    set_variable(dumped, "MLAGEN_MLA_KERNEL", "sm70")
    found = run.json("replay", str(dumped), code=1)
    assert found["error"].startswith("ArgumentError: MLAGEN_MLA_KERNEL: ")
    function, arguments = built("trtllm")
    function(**arguments)


@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["right", "wrong"])
def test_the_result_of_a_gpu_is_compared_with_the_cpu_backend(
    offset: float, dumped: Path, monkeypatch: Patch
) -> None:
    """A relative error above the bound is exit code 1; here the CPU stands for the GPU."""
    as_if_on_gpu(dumped)
    offsets = [offset, 0.0]  # of the GPU, then of the reference
    entry = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla

    def decode(**given: Any) -> Any:
        out, lse = entry(**given)
        return out + offsets.pop(0), lse

    monkeypatch.setitem(replaying._FUNCTIONS, entry.__name__, decode)
    monkeypatch.setattr(replaying, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(replaying, "_name_of", lambda _: "a GPU")

    found = run.json("replay", str(dumped), code=int(bool(offset)))

    assert (found["device"], found["error"]) == ("a GPU", None)
    assert (found["relative_error"] > found["error_bound"]) is bool(offset)
    assert found["is_right"] is not bool(offset)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 4e-3), (torch.float8_e4m3fn, 5e-2)], ids=str
)
def test_the_bound_is_that_of_the_dtypes(dtype: torch.dtype, bound: float, folder: Path) -> None:
    """An 8-bit call may have larger errors; a workspace of bytes does not make it one."""
    arguments = MlaCase(name="", seq_lens=(9,), heads=2, dtype=dtype).build("cpu").arguments()
    arguments["workspace_buffer"] = torch.zeros(16, dtype=torch.uint8)
    observed(mlagen.mla.trtllm_batch_decode_with_kv_cache_mla)(**arguments)
    assert replaying._bound_of(read_dump(last_of(folder))) == bound


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("out", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([3.0, 5.0], [0.0, 5.0], 0.6),
        ([0.0, 2.0], [0.0, 0.0], 2.0),
        ([-INF, 4.0], [-INF, 4.0], 0.0),
        ([NAN, 4.0], [3.0, 4.0], INF),
        ([3.0, 4.0], [3.0, INF], INF),
    ],
)
def test_the_relative_error(out: list[float], expected: list[float], error: float) -> None:
    """Elements that are not finite must be the same in both."""
    got = replaying.relative_error(torch.tensor(out), torch.tensor(expected))
    assert got == pytest.approx(error)
