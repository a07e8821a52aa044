"""Dump files from elsewhere: anything but a dump is one line, and nothing in it is executed."""

from __future__ import annotations

import json
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_tools.replay import run as replaying
from cache_tools.replay.document import read_dump
from mlagen.errors import ArgumentError
from tests.cache_tools.conftest import Run
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
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the dump of a call with contents."""
    observe(monkeypatch, MLAGEN_DUMP=str(tmp_path), MLAGEN_DUMP_TENSORS="1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    function, arguments = built("xqa_batch_mla")
    function(**arguments)
    (path,) = tmp_path.glob("*.json")
    return path


def edit(path: Path, change: Any) -> None:
    """Change the data of a dump."""
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a file of MLAGEN_DUMP, got another"),
        ("[]", "expected a file of MLAGEN_DUMP, got another"),
        ('{"kernel": "x"}', "expected a file of MLAGEN_DUMP, got another"),
        ("[" * 100_000, "expected a file of MLAGEN_DUMP, got another"),
        ('{"mlagen_dump": 99}', "expected a dump of format 1, got 99"),
        ('{"mlagen_dump": 1}', "environment: expected a value of type dict, got None"),
        (" " * (5 << 20), "expected a readable file, got more than 4 MiB"),
    ],
    ids=["empty", "a list", "a record", "deep", "another format", "bare", "large"],
)
def test_another_file_is_one_line(content: str, message: str, run: Run, tmp_path: Path) -> None:
    """The exit code is that of bad usage, and the line names the file."""
    path = tmp_path / "dump.json"
    path.write_text(content, encoding="utf-8")

    result = run("replay", str(path))

    assert result.exit_code == 2
    assert result.stderr == f"mlagen: {path}: {message}\n"


def test_a_missing_file_is_one_line(run: Run, tmp_path: Path) -> None:
    """A FIFO is rejected too, instead of waiting for a writer."""
    os.mkfifo(tmp_path / "fifo")

    for name, reason in (("none", "No such file or directory"), ("fifo", "a FIFO")):
        result = run("replay", str(tmp_path / name))
        assert result.exit_code == 2
        expected = f"mlagen: {tmp_path / name}: expected a readable file, got {reason}\n"
        assert result.stderr == expected


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a shape beyond the memory": ({"shape": [3, 1, 2, 576]}, "query.shape: expected elements"),
    "a size beyond memory": ({"shape": [2**40, 1, 2, 576]}, "query.shape: expected elements"),
    "many elements in few bytes": (
        {"shape": [2**20, 2**20], "strides": [1, 1]},
        "query.shape: expected elements",
    ),
    "an offset beyond the memory": ({"offset": 2**40}, "query.shape: expected elements"),
    "an odd offset": ({"offset": 1, "shape": [1, 1, 1, 1]}, "query.offset: expected a multiple"),
    "a negative stride": ({"strides": [-1, 1, 1, 1]}, "query.strides: expected sizes"),
    "fewer strides": ({"strides": [1]}, "query.strides: expected 4 numbers"),
    "another storage": ({"storage": 99}, "query.storage: expected an index below"),
    "no dtype": ({"dtype": "Tensor"}, "query.dtype: expected a dtype"),
    "a device that is no name": ({"device": 1}, "query.device: expected a name"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_metadata_of_no_tensor_is_rejected(
    change: dict[str, Any], message: str, path: Path, run: Run
) -> None:
    """The message names the argument."""
    entry = {"tensor": QUERY | change}
    edit(path, lambda data: data["call"]["arguments"].update(query=entry))

    result = run("replay", str(path))

    assert result.exit_code == 2, result.stdout
    assert result.stderr.startswith(f"mlagen: {message}")


ARGUMENTS: dict[str, Any] = {
    "another object": {"object": "Path", "fields": {}},
    "another field": {"object": "ChunkedMask", "fields": {"__class__": 1}},
    "another value": {"other": "numpy.ndarray"},
    "a list": [1],
    "an empty object": {},
    "two lists": {"list": {"list": 1}},
}


@pytest.mark.parametrize("value", ARGUMENTS.values(), ids=ARGUMENTS)
def test_a_value_that_no_dump_has_is_rejected(value: Any, path: Path, run: Run) -> None:
    """Only classes of mlagen.mla are made."""
    edit(path, lambda data: data["call"]["arguments"].update(query=value))

    result = run("replay", str(path))

    assert result.exit_code == 2
    assert result.stderr.startswith("mlagen: query: expected ")
    assert result.stderr.count("\n") == 1


def test_an_entry_that_is_no_entry_point_is_rejected(path: Path, run: Run) -> None:
    """The message lists the entry points."""
    edit(path, lambda data: data.update(entry="os.system"))

    result = run("replay", str(path))

    assert result.exit_code == 2
    assert "entry: expected one of trtllm_batch_decode_with_kv_cache_mla, " in result.stderr


def test_more_memory_than_there_is_is_rejected(path: Path, run: Run) -> None:
    """Nothing is allocated."""
    edit(path, lambda data: data["call"]["storages"].append(1 << 47))

    result = run("replay", str(path))

    assert result.exit_code == 2
    assert result.stderr.startswith("mlagen: storages: expected tensors of at most ")


class Planted:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zip", "pickle", "text", "missing", "a list", "other bytes"])
def test_a_file_of_no_tensors_is_rejected(kind: str, path: Path, run: Run, tmp_path: Path) -> None:
    """No object but tensors is loaded."""
    data = json.loads(path.read_text(encoding="utf-8"))
    tensors = tmp_path / data["tensors"]
    planted = tmp_path / "planted"
    if kind == "zip":
        torch.save({"call:query": Planted(planted)}, tensors)
    elif kind == "pickle":
        tensors.write_bytes(pickle.dumps(Planted(planted)))
    elif kind == "text":
        tensors.write_text("no tensors", encoding="utf-8")
    elif kind == "missing":
        tensors.unlink()
    elif kind == "a list":
        torch.save([1], tensors)
    else:
        torch.save({"call:query": torch.zeros(3, dtype=torch.uint8)}, tensors)

    result = run("replay", str(path))

    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert not planted.exists()


def test_a_compressed_file_of_tensors_has_a_limit(path: Path, run: Run) -> None:
    """The size is that after decompression."""
    data = json.loads(path.read_text(encoding="utf-8"))
    with zipfile.ZipFile(path.parent / data["tensors"], "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", "")
        archive.infolist()[0].file_size = 1 << 40

    result = run("replay", str(path))

    assert result.exit_code == 2
    assert "bytes or less, got 1099511627776" in result.stderr


@pytest.mark.parametrize("name", ["../other.pt", "/etc/passwd", ".hidden", ""])
def test_tensors_lie_beside_the_dump(name: str, path: Path, run: Run) -> None:
    """No other folder is read."""
    edit(path, lambda data: data.update(tensors=name))

    result = run("replay", str(path))

    assert result.exit_code == 2
    assert "tensors: expected the name of a file beside it, got " in result.stderr


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
    outcomes: set[str] = set()
    messages = []
    for _ in range(60):
        path.write_text(json.dumps(_replace_any(data, chosen)), encoding="utf-8")
        try:
            outcome = replaying.replay(read_dump(path), seed=0)
            outcomes.add("raised" if outcome.error else "returned")
        except ArgumentError as error:
            messages.append(str(error))

    assert "returned" in outcomes
    assert messages
    assert all(message.isprintable() for message in messages)
