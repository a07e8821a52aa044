"""Dump files from elsewhere: anything but a dump is one line, and nothing in it is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_tools.replay import run as replaying
from cache_tools.replay.document import read_dump
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
        ('{"mlagen_dump": 99}', "expected a dump of format 1, got 99"),
        ('{"mlagen_dump": 1}', "environment: expected a value of type dict, got None"),
        (" " * (5 << 20), "expected a readable file, got more than 4 MiB"),
        (None, "expected a readable file, got No such file or directory"),
        ("FIFO", "expected a readable file, got a FIFO"),
    ],
    ids=["empty", "list", "record", "deep", "format", "bare", "large", "missing", "FIFO"],
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


BESIDE = "tensors: expected the name of a file beside it, got "

# Changed values of a dump, and the message.
CHANGES: list[tuple[str, Any, str]] = [
    ("query", tensor(shape=[3, 1, 2, 576]), "query.shape: expected elements"),
    ("query", tensor(shape=[2**40, 1, 2, 576]), "query.shape: expected elements"),
    ("query", tensor(shape=[2**20, 2**20], strides=[1, 1]), "query.shape: expected elements"),
    ("query", tensor(offset=2**40), "query.shape: expected elements"),
    ("query", tensor(offset=1, shape=[1, 1, 1, 1]), "query.offset: expected a multiple"),
    ("query", tensor(strides=[-1, 1, 1, 1]), "query.strides: expected sizes"),
    ("query", tensor(strides=[1]), "query.strides: expected 4 numbers"),
    ("query", tensor(storage=99), "query.storage: expected an index below"),
    ("query", tensor(dtype="Tensor"), "query.dtype: expected a dtype"),
    ("query", tensor(device=1), "query.device: expected a name"),
    ("query", {"object": "Path", "fields": {}}, "query: expected "),
    ("query", {"object": "ChunkedMask", "fields": {"__class__": 1}}, "query: expected "),
    ("query", {"other": "numpy.ndarray"}, "query: expected "),
    ("query", [1], "query: expected "),
    ("query", {}, "query: expected "),
    ("query", {"list": {"list": 1}}, "query: expected "),
    ("entry", "os.system", "entry: expected one of trtllm_batch_decode_with_kv_cache_mla, "),
    ("storages", 1 << 47, "storages: expected tensors of at most "),
    *(("tensors", name, BESIDE) for name in ("../other.pt", "/etc/passwd", ".hidden", "")),
]


@pytest.mark.parametrize(("place", "value", "message"), CHANGES, ids=str)
def test_a_value_of_no_dump_is_rejected(place: str, value: Any, message: str, path: Path) -> None:
    """Only tensors and classes of mlagen.mla are made, nothing beyond the memory is allocated."""
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


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def compress(path: Path, _planted: Planted) -> None:
    """Write an archive that claims to be larger after decompression."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", "")
        archive.infolist()[0].file_size = 1 << 40


def unpickle(program: bytes) -> Callable[[Path, Planted], object]:
    """Return a function that writes an archive with another pickle program."""

    def write(path: Path, _planted: Planted) -> None:
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in contents.items():
                archive.writestr(name, program if name.endswith(".pkl") else content)

    return write


# What replaces the file of the tensors, or a planted object that does, and a part of the message.
REPLACEMENTS: dict[str, tuple[Callable[[Path, Planted], object], str]] = {
    "zip": (lambda path, planted: torch.save({"call:query": planted}, path), ""),
    "pickle": (lambda path, planted: path.write_bytes(pickle.dumps(planted)), ""),
    "text": (lambda path, _: path.write_text("no tensors", encoding="utf-8"), ""),
    "missing": (lambda path, _: path.unlink(), ""),
    "a list": (lambda path, _: torch.save([1], path), ""),
    "other bytes": (lambda path, _: torch.save({"call:query": torch.zeros(3).byte()}, path), ""),
    "an empty stack": (unpickle(b"\x80\x02."), "expected a file of tensors, got "),
    "a cut number": (unpickle(b"\x80\x02J\x01"), "expected a file of tensors, got "),
    "a missing argument": (
        unpickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."),
        "expected a file of tensors, got ",
    ),
    "compressed": (compress, "bytes or less, got 1099511627776"),
}


@pytest.mark.parametrize(("replace", "message"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_file_of_no_tensors_is_rejected(
    replace: Callable[[Path, Planted], object], message: str, path: Path, tmp_path: Path
) -> None:
    """No object but tensors is loaded, and none above the limit after decompression."""
    tensors = path.with_name(json.loads(path.read_text(encoding="utf-8"))["tensors"])
    replace(tensors, Planted(tmp_path / "planted"))
    result = run("replay", str(path))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr
    assert not (tmp_path / "planted").exists()


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
            returned += replaying.replay(read_dump(path), seed=0).error is None
        except ArgumentError as error:
            messages.append(str(error))
    assert returned
    assert messages
    assert all(message.isprintable() for message in messages)
