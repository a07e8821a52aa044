"""Text of every command, as in `snapshots.txt`, renewed by `MLAGEN_ACCEPT=1`; JSON documents."""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest
import torch

from cache_tools.benchmark.cases import Case
from cache_tools.benchmark.outcomes import Outcome
from cache_tools.cli import cli
from cache_tools.commands import bench
from cache_tools.commands.demo import print_demo
from mlagen.runtime import device
from tests.cache.builds import TOOLCHAIN
from tests.cli_documents import DOCUMENTS
from tests.fake_machine import FAILED, FakeMachine
from tests.fixture_types import Patch
from tests.kernels import COMBINE
from tests.observed_calls import built, observe

from .altered import fill, use
from .conftest import Setting, run

FILE = Path(__file__).parent / "snapshots.txt"
PROMPT = "$ mlagen "
WANTED = (
    "combine(arch=sm_90a, dtype=bf16, head_dim_vo=512, batch_invariant=False, "
    "has_output_gate=False)"
)

BOTH = ("--kernel", str(COMBINE), "--kernel", str(COMBINE).replace("512", "256"))

# Arguments of each command, in a folder with a bundle and a dump; KEY and OTHER are cached.
COMMANDS: dict[str, tuple[str, ...]] = {
    "cache dir": (),
    "cache ls": (),
    "cache stats": (),
    "cache show": ("KEY",),
    "cache why": (WANTED,),
    "cache verify": (),
    "cache prune": ("--older-than", "1h"),
    "cache gc": (),
    "cache rm": ("KEY",),
    "cache clear": (),
    "cache export": ("new.tar.gz",),
    "cache import": ("there.tar.gz",),
    "cache push": ("new.tar.gz",),
    "cache pull": ("there.tar.gz",),
    "doctor": (),
    "models": (),
    "kernel show": (str(COMBINE),),
    "prewarm": (*BOTH, "-j", "1"),
    "bench": ("--compare", "fa3"),
    "replay": ("dump.json",),
}

# What differs between machines and days, and what stands for it.
MASKS = {
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00": "TIME",
    r"\b\d+(\.\d+)? (us|ms|s|min|h|d)\b": "DURATION",
    r"\b\d+(\.\d+)? ([KMG]i)?B\b": "SIZE",
    r"\b[\d.]+%": "SHARE",
    r"\b[0-9a-f]{64}\b": "DIGEST",
    r"nvrtc-[\d.]+": "nvrtc-N",
    r"\b\d+(\.\d+){2,}(\+\w+)?": "VERSION",
    r" {2,}": "  ",
}
# Numbers of a compiler, and packages of a machine.
OWN_MASKS = {
    "kernel show": {r"\b\d+\b(?= (bytes|per|templates|of))|(?<=SM  )\d+": "N"},
    "prewarm": {r"\d+(?= registers)": "N"},
    "doctor": {
        r"(callers  ).*": r"\1VERSIONS",
        r"(NVRTC  VERSION).*": r"\1 PATH",
        r"\b\d+\.\d+\b": "VERSION",
    },
}


def masked(text: str, command: str, keys: list[str], folder: Path) -> str:
    """Return the text without what differs between machines and days."""
    known = {str(folder): "FOLDER"} | dict(
        zip([*keys, *(key[:8] for key in keys)], ("KEY", "OTHER") * 2, strict=True)
    )
    for value, name in known.items():
        text = text.replace(value, name)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
    for pattern, name in {**MASKS, **OWN_MASKS.get(command, {})}.items():
        text = re.sub(pattern, name, text)
    return re.sub(r"\b(?=[a-f]*\d)[0-9a-f]{8}\b", "PREFIX", text)


def snapshots() -> dict[str, str]:
    """Return the text of each command in the file."""
    parts = FILE.read_text(encoding="utf-8").split(PROMPT)[1:]
    return {name: text for name, _, text in (part.partition("\n") for part in parts)}


def require_snapshot(name: str, text: str) -> None:
    """Require the text that is in git."""
    if os.environ.get("MLAGEN_ACCEPT") == "1":
        found = sorted({**snapshots(), name: text}.items())
        FILE.write_text("".join(f"{PROMPT}{each}\n{part}" for each, part in found))
    assert text == snapshots()[name]


def of_fa3(case: Case) -> Outcome:
    """Return a slower result for MLA, and none for GQA."""
    return Outcome(us=1500.0, error=2e-3) if case.family == "mla" else FAILED


@pytest.fixture
def keys(cache_dir: Path, tmp_path: Path, monkeypatch: Patch, setting: Setting) -> list[str]:
    """Cache and bundle two kernels of fixed keys, one of them unused, on a machine without GPU."""
    keys = fill(cache_dir, 2)
    use(next(cache_dir.glob(f"v2/*/{keys[0]}.*")), age_s=7200, now=time.time())
    setting("MLAGEN_TOOLCHAIN", TOOLCHAIN)
    monkeypatch.chdir(tmp_path)
    run("cache export there.tar.gz")
    monkeypatch.setattr(bench, "_machine", lambda *_: FakeMachine(fa3=of_fa3))
    monkeypatch.setattr(device, "visible_devices", list)
    monkeypatch.setattr(device, "driver_version", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return keys


@pytest.mark.parametrize("command", COMMANDS)
def test_the_text_of_a_command(
    command: str, keys: list[str], tmp_path: Path, monkeypatch: Patch
) -> None:
    """Both streams and the exit code are those of the snapshot."""
    if command == "replay":
        observe(monkeypatch, MLAGEN_DUMP=str(tmp_path / "dumps"), MLAGEN_DUMP_TENSORS="1")
        function, values = built("trtllm")
        function(**values)
        for file in (tmp_path / "dumps").iterdir():
            file.rename(f"dump{file.suffix}")
    named = dict(zip(("KEY", "OTHER"), keys, strict=True))
    arguments = [named.get(word, word) for word in COMMANDS[command]]

    result = run(*command.split(), *arguments, answer="y\n")

    errors = f"--- stderr\n{result.stderr}" if result.stderr else ""
    code = f"--- exit code {result.exit_code}\n" if result.exit_code else ""
    require_snapshot(command, masked(f"{result.stdout}{errors}{code}", command, keys, tmp_path))


def test_every_command_has_a_snapshot() -> None:
    """A new command needs one, and none is left of an old one; the demo has its own test."""

    def names(group: object, begin: str = "") -> list[str]:
        commands = getattr(group, "commands", None)
        if commands is None:
            return [begin.strip()]
        return [name for word in commands for name in names(commands[word], f"{begin} {word}")]

    assert sorted(names(cli)) == sorted([*COMMANDS, "demo"])
    assert list(snapshots()) == sorted(names(cli))


@pytest.mark.parametrize("command", sorted(DOCUMENTS.keys() - {"replay"}))
def test_the_document_of_a_command_fits_its_schema(
    command: str, keys: list[str], cache_dir: Path
) -> None:
    """The names and types are exactly those of the schema, in order, beside damage too."""
    next(cache_dir.glob(f"v2/*/{keys[1]}.*")).write_text("{")
    words = [keys[0] if word in {"KEY", "OTHER"} else word for word in COMMANDS[command]]
    if command in {"cache export", "cache push"}:
        words.append(keys[0])
    fails = {"cache verify", "cache why"}
    run.json(*command.split(), *words, code=int(command in fails), answer="y\n")


def demo_document(*, is_right: bool) -> dict[str, object]:
    """Return a document of the demo on a GPU."""
    return {
        "case": "mla bf16, 2 x ~4096, 16 heads",
        "seq_lens": [17, 8001],
        "gpu": "NVIDIA H200",
        "times": [{"name": "first call", "ms": 676.4, "note": "from an empty cache"}],
        "result": {"error": 0.0018, "error_bound": 0.006, "is_right": is_right},
    }


def test_the_text_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """Call, times and error of a right and of a wrong result are those of the file."""
    print_demo(demo_document(is_right=True))
    print_demo(demo_document(is_right=False))
    require_snapshot("demo", capsys.readouterr().out)
