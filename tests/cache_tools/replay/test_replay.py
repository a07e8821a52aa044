"""`mlagen replay`: dumped calls run again, on CPU tensors where there is no GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mlagen
from cache_tools.replay import run as replaying
from cache_tools.replay.dump import read_dump, rebuilt
from mlagen.errors import ArgumentError
from tests.cache_tools.conftest import run, start, without
from tests.fixture_types import Patch
from tests.observed_calls import BUILDERS, built, observe
from tests.problems.entry_points import ENTRY_POINTS
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, mla_case


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: Patch) -> None:
    """Replay on CPU tensors, on a machine with a GPU too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def folder(monkeypatch: Patch, tmp_path: Path) -> Path:
    """Request dumps with contents in a folder."""
    folder = tmp_path / "dumps"
    observe(monkeypatch, MLAGEN_DUMP=str(folder), MLAGEN_DUMP_TENSORS="1")
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


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Edit the JSON text of a dump."""
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def as_if_on_gpu(path: Path) -> None:
    """Edit a dump: its tensors were on a GPU."""
    edit(path, lambda text: text.replace('"device": "cpu"', '"device": "cuda:0"'))


TWO: dict[str, Any] = {"name": "", "seq_lens": (37, 9)}
CASES: dict[str, MlaCase | GqaCase] = {
    "xqa": GqaCase(**TWO, q_len=3, mask="random"),
    "xqa_batch": GqaCase(**TWO, kv="nvfp4", layout="HND"),
    "trtllm_gqa": GqaCase(**TWO, cache_layout="stacked", window=8, sink=1.0),
    "trtllm": mla_case("bf16 over fp8_ds_mla", **TWO, heads=2, page_size=8, top_k=4),
}


def named_call(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return an observed call of an entry point, or one of the cases."""
    if name in BUILDERS:
        return built(name)
    entry = ENTRY_POINTS[name.removesuffix(" of a case")]
    arguments = entry.arguments(CASES[name.removesuffix(" of a case")].build("cpu"))
    return entry.function, arguments


@pytest.mark.parametrize("name", [*BUILDERS, *(f"{name} of a case" for name in CASES)])
def test_a_call_is_replayed_as_it_was(name: str, folder: Path) -> None:
    """Contents, strides and offsets are those of the call, and the result is the same."""
    function, arguments = named_call(name)
    expected = function(**arguments)
    path = last_of(folder)
    dump = read_dump(path)
    given = rebuilt(dump, None)

    outputs, _, problem = replaying._run(dump.entry, given, None)
    found = run.json("replay", str(path))

    assert problem is None
    for key, tensor in arguments.items():
        again = given["call"].get(key)
        if isinstance(tensor, torch.Tensor) and isinstance(again, torch.Tensor):
            assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
            assert again.stride() == tensor.stride()
    results = arguments.get("output") if expected is None else expected
    likes = results if isinstance(results, tuple) else (results,)
    tensors = [each for each in likes if isinstance(each, torch.Tensor)]
    for out, like in zip(outputs, tensors, strict=True):
        assert torch.equal(out.view(torch.uint8), like.view(torch.uint8))
    assert found["served_by"] == (["CPU backend"] if outputs else [])
    assert (found["is_right"], found["relative_error"], found["device"]) == (True, None, "cpu")


def test_views_of_one_tensor_share_memory_again(folder: Path) -> None:
    """Latent and rope part of one cache stay interleaved; what does not overlap is apart."""
    function, arguments = built("planless")
    whole = torch.randn(2, 8, 576).bfloat16()
    query = torch.zeros(1, 2, 512, dtype=torch.bfloat16).expand(2, 2, 512)
    parts = {"ckv_cache": whole[1:, :, :512], "kpe_cache": whole[1:, :, 512:], "q_nope": query}
    function(**{**arguments, **parts, "q_pe": whole[:1, :2, :64].transpose(0, 1).expand(2, 2, 64)})

    dump = read_dump(last_of(folder))

    given = rebuilt(dump, None)["call"]
    latent, rope = given["ckv_cache"], given["kpe_cache"]
    assert rope.data_ptr() == latent.data_ptr() + 1024
    assert latent.stride() == rope.stride() == whole.stride()
    assert given["q_nope"].stride() == query.stride()
    assert torch.equal(rope, whole[1:, :, 512:])
    assert max(dump.storages["call"][:3]) <= whole[1:].nbytes + 256


def test_a_call_on_a_gpu_is_not_compared_without_one(dumped: Path) -> None:
    """The text says that the kernels did not run; the exit code is 3."""
    as_if_on_gpu(dumped)
    result = run("replay", str(dumped))
    assert result.exit_code == 3
    assert "CPU tensors, as there is no GPU here\n" in result.stdout
    assert "relative error  none: the kernels did not run\n" in result.stdout
    assert result.stdout.endswith("\nnothing compared: the call was on a GPU\n")
    assert run.json("replay", str(dumped), code=3)["is_right"] is None


def test_a_missing_numpy_causes_no_warning(dumped: Path) -> None:
    """The NumPy warning of torch is suppressed: no command uses NumPy."""
    _, errors = start("replay", str(dumped), before=without("numpy")).communicate(timeout=100)
    assert errors == ""


def test_a_call_that_raised_raises_again(folder: Path) -> None:
    """The exit code is 1, and the text has both errors; without the GPU of the call too."""
    function, arguments = built("trtllm")
    arguments["query"] = arguments["query"][..., :100]
    with pytest.raises(ArgumentError) as caught:
        function(**arguments)
    path = last_of(folder)
    as_if_on_gpu(path)

    result, found = run("replay", str(path)), run.json("replay", str(path), code=1)

    assert result.exit_code == 1
    assert found["error"] == found["dumped"]["error"] == f"ArgumentError: {caught.value}"
    assert result.stdout.count(found["error"]) == 2
    assert "relative error  none: the call raised\n" in result.stdout


def test_the_kernel_settings_of_the_dumped_process_apply(dumped: Path) -> None:
    """An invalid one is the error of the replay; afterwards the own settings are back."""
    data = json.loads(dumped.read_text(encoding="utf-8"))
    data["environment"]["MLAGEN_MLA_KERNEL"] = "sm70"
    dumped.write_text(json.dumps(data), encoding="utf-8")
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
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))

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
    mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert replaying._bound_of(read_dump(last_of(folder))) == bound
