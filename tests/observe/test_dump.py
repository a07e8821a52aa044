"""MLAGEN_DUMP: what is written of a call, where, and how often."""

from __future__ import annotations

import json
import logging
import os
import stat
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from mlagen.errors import ArgumentError
from mlagen.observe import dump, observed, tensor_file
from tests.faults.strangers import STRANGER, give_away
from tests.fixture_types import Log, Patch
from tests.observed_calls import built, dumps_in, observe


@pytest.fixture
def folder(monkeypatch: Patch, tmp_path: Path) -> Path:
    """Request dumps in a folder that does not exist yet."""
    folder = tmp_path / "more" / "dumps"
    observe(monkeypatch, MLAGEN_DUMP=str(folder))
    return folder


def test_a_tensor_is_described_with_its_place_in_memory(folder: Path) -> None:
    """Its storage has the bytes that the call reaches, from an aligned address."""
    function, arguments = built("trtllm")
    whole = torch.zeros(2, 1, 2, 1152, dtype=torch.bfloat16)

    function(**{**arguments, "query": whole[..., 576:], "max_seq_len": 8})

    call = dumps_in(folder)[0]["call"]
    assert call["arguments"]["query"] == {
        "tensor": {
            "dtype": "bfloat16",
            "shape": [2, 1, 2, 576],
            "strides": [2304, 2304, 1152, 1],
            "device": "cpu",
            "storage": (index := call["arguments"]["query"]["tensor"]["storage"]),
            "offset": 128,  # 1152 bytes from the start, less four times 256
        }
    }
    assert call["storages"][index] == whole.nbytes - 1024
    assert "out" not in call["arguments"]


def test_calls_of_one_signature_are_dumped_once(folder: Path) -> None:
    """Lengths of a growing batch and addresses make no other signature; shapes do."""
    function, arguments = built("trtllm")
    for length in (100, 101, 102, 103):
        function(**{**arguments, "max_seq_len": length, "query": arguments["query"].clone()})
    function(**{**arguments, "query": arguments["query"][:, :, :1]})
    shapes = [each["call"]["arguments"]["query"]["tensor"]["shape"] for each in dumps_in(folder)]
    assert shapes == [[2, 1, 2, 576], [2, 1, 1, 576]]


def test_each_call_that_raises_is_dumped(folder: Path) -> None:
    """Also where the signature was dumped before; infinities are text, as JSON has none."""
    function, arguments = built("xqa")
    function(**arguments)

    for factor in (-1.0, float("-inf")):
        with pytest.raises(ArgumentError):
            function(**{**arguments, "rcp_out_scale": factor})

    rule = "ArgumentError: rcp_out_scale: expected a finite number above 0, got"
    first, *raised = dumps_in(folder)
    assert first["outcome"]["error"] is None
    assert [each["outcome"]["error"] for each in raised] == [f"{rule} -1.0", f"{rule} -inf"]
    assert raised[1]["call"]["arguments"]["rcp_out_scale"] == {"float": "-inf"}
    for path in folder.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_a_process_that_ends_in_a_call_has_dumped_it(folder: Path, monkeypatch: Patch) -> None:
    """The file is complete before the call runs; its outcome is null then."""

    class EndError(BaseException):
        pass

    def end(*_: Any, **__: Any) -> None:
        raise EndError

    monkeypatch.setattr("mlagen.mla.xqa.MLA.run", end)
    function, arguments = built("xqa_batch_mla")
    with pytest.raises(EndError):
        function(**arguments)
    assert [each["outcome"] for each in dumps_in(folder)] == [None]


def test_a_run_has_the_construction_and_the_plan_of_its_wrapper(folder: Path) -> None:
    """A plan that raised is not the plan of later runs."""
    run, arguments = built("run")
    assert isinstance(run, MethodType)
    plan: Any = getattr(run.__self__, "plan")  # noqa: B009 - of any type
    with pytest.raises(ArgumentError):
        plan(*[None] * 12)

    run(**arguments)

    last = dumps_in(folder)[-1]
    assert last["entry"] == "BatchMLAPagedAttentionWrapper.run"
    assert list(last["init"]["arguments"]) == ["float_workspace_buffer"]
    assert last["plan"]["arguments"]["q_data_type"] == {"dtype": "bfloat16"}


@pytest.mark.parametrize("kind", ["small", "large", "captured"])
def test_contents_are_written_on_request(kind: str, monkeypatch: Patch, tmp_path: Path) -> None:
    """A file has the bytes of all storages but workspaces, unless they are above the limit."""
    observe(monkeypatch, MLAGEN_DUMP=str(tmp_path), MLAGEN_DUMP_TENSORS="1")
    monkeypatch.setattr(observed, "is_capturing", lambda _: kind == "captured")
    function, arguments = built("trtllm")
    if kind == "large":
        monkeypatch.setattr(dump, "MAX_TENSOR_BYTES", arguments["query"].nbytes + 40)

    function(**arguments)

    (call,) = dumps_in(tmp_path)
    assert call["is_captured"] == (kind == "captured")
    assert call["has_tensors"] == (kind == "small")
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) == call["has_tensors"]
    if files:
        contents = tensor_file.read_tensors(files[0], 1 << 30)
        assert len(contents) == len(call["call"]["storages"]) - 1
        for name in ("query", "kv_cache", "block_tables", "seq_lens"):
            index = call["call"]["arguments"][name]["tensor"]["storage"]
            expected = arguments[name].contiguous().view(torch.uint8).flatten()
            assert torch.equal(contents[f"call:{index}"], expected)


def test_other_programs_read_the_contents(tmp_path: Path) -> None:
    """The format is that of safetensors; files that it writes are read."""
    library: Any = pytest.importorskip("safetensors.torch", reason="needs safetensors")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    tensors = {"a": torch.arange(9, dtype=torch.uint8), "b": torch.empty(0, dtype=torch.uint8)}
    with ours.open("wb") as file:
        tensor_file.write_tensors(file, tensors)
    library.save_file(tensors, theirs, metadata={"format": "pt"})
    for found in (library.load_file(ours), tensor_file.read_tensors(theirs, 9)):
        assert {name: each.tolist() for name, each in found.items()} == {
            name: each.tolist() for name, each in tensors.items()
        }


def test_a_tensor_without_storage_is_named_only(folder: Path) -> None:
    """Neither memory outside of a storage is read, nor the storage grown."""
    function, arguments = built("trtllm")
    cache = arguments["kv_cache"]
    cache.untyped_storage().resize_(100)
    with pytest.raises(ArgumentError):
        function(**{**arguments, "query": arguments["query"][..., :100]})
    (call,) = dumps_in(folder)
    assert call["call"]["arguments"]["kv_cache"] == {"other": "a tensor without storage"}
    assert cache.untyped_storage().nbytes() == 100


def test_the_number_of_dumps_is_bounded(folder: Path, monkeypatch: Patch, caplog: Log) -> None:
    """Calls that raise have a limit of their own; one warning says that there is a limit."""
    monkeypatch.setattr(dump, "MAX_CALLS", 2)
    monkeypatch.setattr(dump, "MAX_ERRORS", 1)
    function, arguments = built("trtllm")
    caplog.set_level(logging.WARNING, logger="mlagen")

    for top_k in (0, 16, 32, 64):
        with pytest.raises(ArgumentError):
            function(**{**arguments, "sparse_mla_top_k": top_k, "kv_lora_rank": 500})

    assert len(dumps_in(folder)) == 3
    assert caplog.messages == ["MLAGEN_DUMP: 2 calls dumped, from now on only those that raise"]


def test_files_are_private_and_have_names_of_their_own(folder: Path, monkeypatch: Patch) -> None:
    """Modes are 0700 and 0600; names have entry and process, and differ in two containers."""
    function, arguments = built("xqa_mla")
    function(**arguments)

    (path,) = folder.iterdir()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (folder.parent, folder)] == [0o700] * 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name.startswith(f"xqa_mla-{os.getpid()}-")
    folders = [dump.DumpFolder(folder) for _ in range(2)]
    names = {each.new_name("xqa") for each in (*folders, *folders)}
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert len(names | {each.new_name("xqa") for each in (*folders, *folders)}) == 8


@pytest.mark.parametrize("trust", ["", "1"], ids=["own", "shared"])
@pytest.mark.parametrize("whose", ["all", "group", "another"])
def test_a_folder_that_others_can_change_stays_empty(
    whose: str, trust: str, monkeypatch: Patch, tmp_path: Path, caplog: Log
) -> None:
    """It is one warning that says how to go on; with trust in others it is filled."""
    path = tmp_path / "dumps"
    path.mkdir(mode=0o700)
    observe(monkeypatch, MLAGEN_DUMP=str(path), MLAGEN_TRUST_SHARED=trust)
    if whose == "another":
        give_away(path, monkeypatch)
    else:
        path.chmod(0o777 if whose == "all" else 0o770)
    function, arguments = built("trtllm")
    caplog.set_level(logging.WARNING, logger="mlagen")

    for length in (7, 70):
        function(**{**arguments, "max_seq_len": length})

    assert bool(list(path.iterdir())) == bool(trust)
    if not trust:
        (message,) = caplog.messages
        got = f"a folder of user {STRANGER} at" if whose == "another" else "mode 07"
        assert message.startswith(f"MLAGEN_DUMP: expected calls that can be dumped, got {got}")
        command = f"sudo chown -R {os.geteuid()}" if whose == "another" else "chmod -R go-w"
        assert f"({command} {path}, choose another MLAGEN_DUMP, or set" in message


@pytest.mark.parametrize("kind", ["a symbolic link", "Not a directory"])
def test_an_unusable_folder_is_one_warning(
    kind: str, monkeypatch: Patch, tmp_path: Path, caplog: Log
) -> None:
    """Calls go on, and nothing is written elsewhere."""
    path = tmp_path / "dumps"
    if kind == "a symbolic link":
        path.symlink_to(tmp_path)
    else:
        path.touch()
    observe(monkeypatch, MLAGEN_DUMP=str(path))
    function, arguments = built("trtllm")
    caplog.set_level(logging.WARNING, logger="mlagen")

    for length in (7, 70):
        function(**{**arguments, "max_seq_len": length})

    message = f"MLAGEN_DUMP: expected calls that can be dumped, got {kind}: {path}"
    assert caplog.messages == [message]
    assert list(tmp_path.rglob("*.json")) == []


def test_a_file_that_cannot_be_completed_is_removed(tmp_path: Path) -> None:
    """A full disk leaves no partial dump."""

    def fail(file: Any) -> None:
        file.write(b"{")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        dump.DumpFolder(tmp_path).write("a.json", fail)

    assert list(tmp_path.iterdir()) == []
