"""Dump files from elsewhere: anything but a dump is one line, and nothing in it is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_tools.replay import run as replaying
from cache_tools.replay.dump import read_dump
from mlagen.errors import ArgumentError
from tests.cache_tools.conftest import run
from tests.fixture_types import Patch
from tests.observed_calls import built, observe

QUERY: dict[str, Any] = {
    "dtype": "bfloat16",
    "shape": [2, 1, 2, 576],
    "strides": [1152, 1152, 576, 1],
    "device": "cpu",
    "storage": 0,
    "offset": 0,
}


@pytest.fixture
def path(monkeypatch: Patch, tmp_path: Path) -> Path:
    """Return the dump of a call with contents."""
    observe(monkeypatch, MLAGEN_DUMP=str(tmp_path), MLAGEN_DUMP_TENSORS="1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    function, arguments = built("xqa_batch_mla")
    function(**arguments)
    (path,) = tmp_path.glob("*.json")
    return path


ANOTHER = "expected a file of MLAGEN_DUMP, got another"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ANOTHER),
        ("[]", ANOTHER),
        ('{"kernel": "x"}', ANOTHER),
        ("[" * 100_000, ANOTHER),
        ('{"mlagen_dump": 99}', "expected a dump of format 2, got 99"),
        ('{"mlagen_dump": 1}', "expected a dump of format 2, got 1"),
        ('{"mlagen_dump": 2}', "has_tensors: expected a value of type bool, got None"),
        (" " * (5 << 20), "expected a readable file, got more than 4 MiB"),
        (None, "expected a readable file, got No such file or directory"),
        ("FIFO", "expected a readable file, got a FIFO"),
    ],
    ids=["empty", "list", "record", "deep", "format", "old", "bare", "large", "missing", "FIFO"],
)
def test_another_file_is_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    """The exit code is that of bad usage, the line names the file, and no writer is waited for."""
    path = tmp_path / "dump.json"
    if content == "FIFO":
        os.mkfifo(path)
    elif content is not None:
        path.write_text(content, encoding="utf-8")
    result = run("replay", str(path))
    assert (result.exit_code, result.stderr) == (2, f"mlagen: {path}: {message}\n")


def tensor(**changes: Any) -> dict[str, Any]:
    """Return changed metadata of the query."""
    return {"tensor": QUERY | changes}


IN_ITS_STORAGE = "query: expected a tensor in its storage, got "

# Changed values of a dump, and the message.
CHANGES: list[tuple[str, Any, str]] = [
    ("query", tensor(shape=[30, 1, 2, 576]), IN_ITS_STORAGE),
    ("query", tensor(shape=[2**40, 1, 2, 576]), "query.shape: expected at most "),
    ("query", tensor(shape=[2**20, 2**20], strides=[0, 0]), "query.shape: expected at most "),
    ("query", tensor(offset=2**40), IN_ITS_STORAGE),
    ("query", tensor(offset=1, shape=[1, 1, 1, 1]), "query.offset: expected a multiple"),
    ("query", tensor(strides=[-1, 1, 1, 1]), "query: expected shape, strides and offset, got "),
    ("query", tensor(strides=[1]), IN_ITS_STORAGE),
    ("query", tensor(storage=99), "query.storage: expected an index below"),
    ("query", tensor(dtype="Tensor"), "query.dtype: expected a dtype"),
    ("query", {"object": "Path", "fields": {}}, "query: expected "),
    ("query", {"object": "ChunkedMask", "fields": {"__class__": 1}}, "query: expected "),
    ("query", {"object": "PagedKVCache", "fields": {}}, "query: expected all fields of "),
    ("query", {"other": "numpy.ndarray"}, "query: expected "),
    ("query", [1], "query: expected "),
    ("query", {}, "query: expected "),
    ("query", {"list": {"list": 1}}, "query: expected "),
    ("entry", "os.system", "entry: expected one of trtllm_batch_decode_with_kv_cache_mla, "),
    ("storages", 1 << 47, "storages: expected workspaces of at most 2.0 GiB, got "),
    ("has_tensors", False, ".json: expected contents (MLAGEN_DUMP_TENSORS=1, at most 4 GiB, "),
]


@pytest.mark.parametrize(("place", "value", "message"), CHANGES, ids=str)
def test_a_value_of_no_dump_is_rejected(place: str, value: Any, message: str, path: Path) -> None:
    """Only tensors and classes of mlagen.mla are made, in about as much memory as the files."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if place == "query":
        data["call"]["arguments"]["query"] = value
    elif place == "storages":
        data["call"]["storages"].append(value)
    else:
        data[place] = value
    path.write_text(json.dumps(data), encoding="utf-8")

    result = run("replay", str(path))

    assert result.exit_code == 2, result.stdout
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def header(text: str | bytes, contents: bytes = b"") -> bytes:
    """Return a file of tensors with any header."""
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw + contents


def of_one(start: int, end: int, dtype: str = "U8") -> str:
    """Return the header of one tensor."""
    entry = {"dtype": dtype, "shape": [end - start], "data_offsets": [start, end]}
    return json.dumps({"call:0": entry})


NO_TENSORS = "expected a file of dumped tensors, got another"
# What replaces the file of the tensors, and a part of the message.
REPLACEMENTS: dict[str, tuple[bytes | str, str]] = {
    "a pickle": (pickle.dumps(Path("x")), NO_TENSORS),
    "text": (b"no tensors", NO_TENSORS),
    "empty": (b"", NO_TENSORS),
    "a long header": ((1 << 60).to_bytes(8, "little"), NO_TENSORS),
    "a cut header": (header("{}")[:-1], NO_TENSORS),
    "a deep header": (header("[" * 100_000), NO_TENSORS),
    "a list": (header("[]"), NO_TENSORS),
    "no entry": (header('{"call:0": 1}'), NO_TENSORS),
    "no offsets": (header('{"call:0": {"data_offsets": "ab"}}'), NO_TENSORS),
    "another dtype": (header(of_one(0, 8, "F32"), bytes(8)), NO_TENSORS),
    "a negative start": (header(of_one(-8, 0), bytes(8)), NO_TENSORS),
    "cut contents": (header(of_one(0, 8), bytes(7)), NO_TENSORS),
    "large": (header(of_one(0, 1 << 40)), "got more than 4 GiB of contents"),
    "no more than a header": (header(of_one(0, 1 << 30)), NO_TENSORS),
    "another size": (header(of_one(0, 9), bytes(9)), "call:0: expected "),
    "missing": ("", "got No such file or directory"),
    "a FIFO": ("FIFO", "got a FIFO"),
    "a device": ("/dev/zero", "got a device"),
}


@pytest.mark.parametrize(("content", "message"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_file_of_no_tensors_is_rejected(content: bytes | str, message: str, path: Path) -> None:
    """No object is made, no writer is waited for, and memory is that of the file."""
    tensors = path.with_suffix(".safetensors")
    tensors.unlink()
    if content == "FIFO":
        os.mkfifo(tensors)
    elif isinstance(content, str) and content:
        tensors.symlink_to(content)
    elif isinstance(content, bytes):
        tensors.write_bytes(content)
    result = run("replay", str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


ODD: tuple[Any, ...] = (None, True, -1, 0, 1 << 70, 1.5, "", "nan", [], {}, [None], {"tensor": {}})


def _replace_any(value: Any, chosen: random.Random) -> Any:
    """Return data with one value replaced, at a random place."""
    if chosen.random() < 0.2 or not isinstance(value, (dict, list)) or not value:
        return chosen.choice(ODD)
    copy = dict(value) if isinstance(value, dict) else list(value)
    keys = list(copy) if isinstance(copy, dict) else list(range(len(copy)))
    key: Any = chosen.choice(keys)
    copy[key] = _replace_any(copy[key], chosen)
    return copy


def test_odd_values_anywhere_are_rejected_or_replayed(path: Path) -> None:
    """A dump with any value replaced is an outcome, or an ArgumentError on one line."""
    data = json.loads(path.read_text(encoding="utf-8"))
    chosen = random.Random(0)  # noqa: S311 - the same at every run
    returned, messages = 0, []
    for _ in range(60):
        path.write_text(json.dumps(_replace_any(data, chosen)), encoding="utf-8")
        try:
            returned += replaying.replay(read_dump(path)).error is None
        except ArgumentError as error:
            messages.append(str(error))
    assert returned
    assert messages
    assert all(message.isprintable() for message in messages)
