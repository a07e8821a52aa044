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
from mlagen.observe import dump, dump_files, observed
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
    """Views of one tensor share a storage; lengths and page ids on the CPU have values."""
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
            "storage": 0,
            "offset": 128,  # 1152 bytes from the start, less four times 256
        }
    }
    assert call["storages"][0] == whole.nbytes - 1024
    assert call["arguments"]["seq_lens"]["tensor"]["values"] == [7, 3]
    assert "values" not in call["arguments"]["kv_cache"]["tensor"]
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

    monkeypatch.setattr("mlagen.mla.xqa_decode.MLA.run", end)
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
    assert last["plan"]["arguments"]["kv_len_arr"]["tensor"]["values"] == [7, 3]
    assert last["plan"]["arguments"]["q_data_type"] == {"dtype": "bfloat16"}


@pytest.mark.parametrize("kind", ["small", "large", "captured"])
def test_contents_are_written_on_request(kind: str, monkeypatch: Patch, tmp_path: Path) -> None:
    """A file of bytes by part and name is added, without outputs and those above the limit."""
    observe(monkeypatch, MLAGEN_DUMP=str(tmp_path), MLAGEN_DUMP_TENSORS="1")
    monkeypatch.setattr(observed, "is_capturing", lambda _: kind == "captured")
    function, arguments = built("trtllm")
    names = ["query", "kv_cache", "block_tables", "seq_lens"]
    left_out = names[1:2] if kind == "large" else []
    if left_out:
        monkeypatch.setattr(dump, "MAX_TENSOR_BYTES", arguments["query"].nbytes + 40)

    function(**arguments)

    (call,) = dumps_in(tmp_path)
    assert call["left_out"] == [f"call:{name}" for name in left_out]
    assert (call["is_captured"], call["tensors"] is None) == ((kind == "captured"),) * 2
    if call["tensors"] is not None:
        tensors = torch.load(tmp_path / call["tensors"], weights_only=True)
        assert list(tensors) == [f"call:{name}" for name in names if name not in left_out]
        for name in tensors:
            expected = dump.bytes_of(arguments[name.removeprefix("call:")])
            assert torch.equal(tensors[name], expected)


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
    folders = [dump_files.DumpFolder(folder) for _ in range(2)]
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
        dump_files.DumpFolder(tmp_path).write("a.json", fail)

    assert list(tmp_path.iterdir()) == []
