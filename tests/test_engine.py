"""From a spec to a kernel with the real compiler: keys, warm processes, races, kills, damage."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from mlagen import engine
from mlagen.cache.default_store import kernel_store
from mlagen.compiler.toolchain import find_nvrtc, options_for
from mlagen.engine import find_or_build, kernel_for, key_of
from mlagen.errors import CompileError
from mlagen.runtime.loader import LoadedKernel
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import ROOT, together, tree, wait_for
from tests.kernels import COMBINE, WIDE_DECODE, forget, mla_sm80

# Run in a fresh interpreter on COMBINE; the modules named are those a warm process may not need.
LOADED = """
import json, sys
import mlagen.engine
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
spec = CombineSpec(arch=Arch(80), dtype=DType.BF16, head_dim_vo=512)
outcome = getattr(mlagen.engine, sys.argv[1])(spec)
heavy = ("jinja2", "cuda.bindings.driver", "cuda.bindings.nvrtc", "torch", "numpy")
built = getattr(outcome, "built", None)
print(json.dumps({"built": built, "loaded": [name for name in heavy if name in sys.modules]}))
"""


def in_fresh_process(function: str) -> dict[str, Any]:
    """Call a function of the engine on COMBINE in a new interpreter; return what it loaded."""
    command = [sys.executable, "-c", LOADED, function]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return cast("dict[str, Any]", json.loads(done.stdout))


def start_worker(folder: Path) -> subprocess.Popen[str]:
    """Start a process that asks for WIDE_DECODE; see ``engine_worker.py``."""
    command = [sys.executable, "-m", "tests.engine_worker", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def logged(folder: Path, word: str) -> list[int]:
    """Return the process of each log line that begins with ``word``.

    A warning that a compilation takes long is left out: a busy machine may add one.
    """
    log = folder / "log"
    text = log.read_text() if log.exists() else ""
    return [int(pid) for pid in re.findall(rf"^(\d+) {word} (?!.* so far; )", text, re.MULTILINE)]


def test_a_key_is_made_without_rendering_and_compiling(cache_dir: Path) -> None:
    """It needs no Jinja, no bindings, no torch, and touches no cache folder."""
    said = in_fresh_process("key_of")

    assert said["loaded"] == []
    assert not cache_dir.exists()


def test_a_warm_process_loads_neither_jinja_nor_nvrtc() -> None:
    """A kernel that is in the cache is found without Jinja, NVRTC, its bindings or torch."""
    find_or_build(COMBINE)

    said = in_fresh_process("find_or_build")

    assert said == {"built": False, "loaded": []}


def test_every_ingredient_has_a_label() -> None:
    """Family, each field of the spec, each option and the templates stand in the key by name."""
    spec = mla_sm80()
    nvrtc = str(find_nvrtc())

    key = key_of(spec)

    labels = [label for label, _ in key.key_fields]
    options = [option.lstrip("-").split("=")[0] for option in options_for(spec.arch, nvrtc)]
    assert labels == [
        "family",
        *(f"spec.{name}" for name in spec.key_fields()),
        *(f"option.{name}" for name in options),
        "templates",
    ]
    assert len(set(labels)) == len(labels)
    assert dict(key.key_fields).items() >= {
        ("family", "mla_sm80"),
        ("spec.arch", "sm_90a"),
        ("spec.query_dtype", "bf16"),
        ("spec.page_size", "64"),
        ("option.gpu-architecture", "sm_90a"),
        ("option.std", "c++17"),
        ("option.fmad", "true"),
    }
    assert key.toolchain == nvrtc


@pytest.mark.parametrize(
    ("other", "label"),
    [
        (mla_sm80(page_size=32), "spec.page_size"),
        (mla_sm80(rows=128), "spec.block_m"),
    ],
    ids=["another page size", "another tile"],
)
def test_kernels_that_differ_have_keys_that_differ(other: KernelSpec, label: str) -> None:
    """What the specs differ in is what the keys differ in."""
    mine, theirs = key_of(mla_sm80()), key_of(other)

    differences = mine.differences(theirs)

    assert mine.digest != theirs.digest
    assert label in {difference[0] for difference in differences}


def test_editing_a_template_changes_the_key(templates: Path) -> None:
    """A kernel of an edited template is another kernel, and the key says why."""
    before = key_of(COMBINE)
    prelude = templates / "common/types.cuh"
    prelude.write_text(prelude.read_text() + "// edited\n")
    forget()

    after = key_of(COMBINE)

    assert after.digest != before.digest
    assert [label for label, _, _ in after.differences(before)] == ["templates"]


def test_an_entry_says_what_was_built(cache_dir: Path) -> None:
    """The manifest holds symbol, spec and what ptxas said; the cubin is machine code."""
    outcome = find_or_build(COMBINE, created_by="prewarm")

    entry = outcome.entry
    assert outcome.built
    assert outcome.ms > 0
    assert entry.cubin.startswith(b"\x7fELF")
    assert entry.path is not None
    assert entry.path.is_relative_to(cache_dir)
    assert entry.manifest.created_by == "prewarm"
    facts = entry.manifest.facts
    assert facts["kernel"] == {
        "symbol": "combine",
        "spec": COMBINE.key_fields(),
        "dynamic_shared_bytes": 0,
    }
    (said,) = facts["resources"]
    assert said["symbol"] == "combine"
    assert said["registers"] > 0
    assert said["static_shared_bytes"] == 4 * 4 + 4 * 32 * 16  # the struct of combine.cuh


def test_building_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A build says what it compiles and how long it took; a hit says nothing at that level."""
    caplog.set_level(logging.INFO, logger="mlagen")

    find_or_build(COMBINE)
    find_or_build(COMBINE)

    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"compiling {COMBINE} with {find_nvrtc()}: absent in {kernel_store().root}"
    assert re.fullmatch(rf"compiled {re.escape(str(COMBINE))} in \d+\.\d s", second)


@pytest.mark.timeout(60)
def test_sixteen_processes_run_one_compile(tmp_path: Path) -> None:
    """Started together on an empty cache, one of them runs NVRTC and all get the same bytes."""
    workers = [start_worker(tmp_path) for _ in range(16)]
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 16, seconds=40)

    (tmp_path / "go").touch()
    said = [worker.communicate(timeout=30)[0].strip() for worker in workers]

    assert [worker.returncode for worker in workers] == [0] * 16
    assert len(logged(tmp_path, "compiling")) == 1
    assert len(logged(tmp_path, "compiled")) == 1
    assert set(said) == {hashlib.sha256(find_or_build(WIDE_DECODE).entry.cubin).hexdigest()}


@pytest.mark.timeout(60)
def test_killing_the_compiling_process_lets_the_others_finish(tmp_path: Path) -> None:
    """After kill -9 in the middle of NVRTC, one of those who wait compiles, and nothing is left."""
    workers = [start_worker(tmp_path) for _ in range(4)]
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 4, seconds=30)
    (tmp_path / "go").touch()
    wait_for(lambda: logged(tmp_path, "compiling"))

    (victim,) = logged(tmp_path, "compiling")
    os.kill(victim, signal.SIGKILL)
    said = {worker.pid: worker.communicate(timeout=30)[0].strip() for worker in workers}

    statuses = {worker.pid: worker.returncode for worker in workers}
    assert statuses.pop(victim) == -signal.SIGKILL
    assert said.pop(victim) == ""
    assert set(statuses.values()) == {0}
    assert len(logged(tmp_path, "compiling")) == 2
    assert len(logged(tmp_path, "compiled")) == 1
    assert set(said.values()) == {
        hashlib.sha256(find_or_build(WIDE_DECODE).entry.cubin).hexdigest()
    }


def test_a_flipped_byte_is_found_and_the_kernel_built_again(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One damaged byte in a cubin costs a warning and a compile; the bytes are sound again."""
    sound = find_or_build(COMBINE).entry
    assert sound.path is not None
    stored = sound.path / "kernel.cubin"
    damaged = bytearray(sound.cubin)
    damaged[len(damaged) // 2] ^= 0x10
    stored.chmod(0o600)
    stored.write_bytes(damaged)

    outcome = find_or_build(COMBINE)

    assert outcome.built
    assert outcome.entry.cubin == sound.cubin
    assert stored.read_bytes() == sound.cubin
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "kernel.cubin" in warnings[0].getMessage()
    (aside,) = (cache_dir / "v1/quarantine").iterdir()
    assert [path.read_bytes() for path in aside.rglob("kernel.cubin")] == [bytes(damaged)]
    assert "kernel.cubin" in (aside / "reason.json").read_text()


def test_a_kernel_that_does_not_compile_leaves_nothing(templates: Path, cache_dir: Path) -> None:
    """The error names the template's line, no entry is visible, and a mended template builds."""
    role = templates / "kernels/combine/combine.cuh"
    sound = role.read_text()
    line = 1 + sound[: sound.index("__device__")].count("\n")
    role.write_text(sound.replace("__device__", "undefined_type broken; __device__", 1))
    forget()

    with pytest.raises(CompileError) as caught:
        find_or_build(COMBINE)
    left = [path for path in tree(cache_dir) if path.endswith((".cubin", ".json"))]
    role.write_text(sound)
    forget()
    outcome = find_or_build(COMBINE)

    assert f"kernels/combine/combine.cuh:{line} (kernel.cu:" in str(caught.value)
    assert left == []
    assert outcome.built


def test_a_loaded_kernel_is_returned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual call ends in the memo: no key, no store."""
    loaded = LoadedKernel.__new__(LoadedKernel)
    monkeypatch.setitem(engine._loaded, (COMBINE, 0), loaded)
    monkeypatch.setattr(engine, "find_or_build", None)

    assert kernel_for(COMBINE, 0) is loaded


def test_threads_load_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads ask, one loads and all get the same object."""
    loads = []

    def load(code: bytes, spec: KernelSpec, device: int) -> object:
        loads.append((code, spec, device))
        return object()

    monkeypatch.setattr(engine, "_loaded", {})
    monkeypatch.setattr("mlagen.runtime.loader.load", load)
    monkeypatch.setattr("mlagen.runtime.loader.require_no_capture", lambda *_: None)

    kernels = together([lambda: kernel_for(COMBINE, 3)] * 16)

    assert loads == [(find_or_build(COMBINE).entry.cubin, COMBINE, 3)]
    assert len(set(map(id, kernels))) == 1


def test_the_store_is_where_the_settings_say(cache_dir: Path) -> None:
    """What is built lies below MLAGEN_CACHE_DIR and is listed by the store."""
    find_or_build(COMBINE)

    (stored,) = kernel_store().entries()

    assert stored.key == key_of(COMBINE).digest
    assert stored.path.is_relative_to(cache_dir)
