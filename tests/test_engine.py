"""From a spec to a kernel with the real compiler: keys, warm processes, races, kills, damage."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import mlagen
from mlagen import engine
from mlagen.cache.file import decode_all
from mlagen.cache.key import CacheKey
from mlagen.cache.layers import LookUp
from mlagen.cache.store import KernelStore, kernel_store
from mlagen.codegen.sources import key_facts
from mlagen.compiler.toolchain import find_nvrtc, options_for
from mlagen.engine import find_or_build, kernel_for, key_of
from mlagen.errors import CompileError
from mlagen.runtime.loader import LoadedKernel
from mlagen.spec.kernel import KernelSpec
from tests.cache.builds import ROOT, together, tree
from tests.kernels import COMBINE, COMBINE_STATES, clear_caches, mla_sm80

# Runs in a fresh interpreter on COMBINE; a warm process must not load the named modules.
LOADED = """
import json, sys
import mlagen.engine
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSpec
from mlagen.spec.dtype import DType
spec = CombineSpec(arch=Arch(80), dtype=DType.BF16, head_dim_vo=512)
outcome = getattr(mlagen.engine, sys.argv[1])(spec)
heavy = ("jinja2", "cuda.bindings.driver", "cuda.bindings.nvrtc", "cuda.pathfinder")
heavy += ("torch", "numpy")
built = getattr(outcome, "built", None)
print(json.dumps({"built": built, "loaded": [name for name in heavy if name in sys.modules]}))
"""


def in_fresh_process(function: str) -> dict[str, Any]:
    """Call a function of the engine on COMBINE in a new interpreter; return the loaded modules."""
    command = [sys.executable, "-c", LOADED, function]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return cast("dict[str, Any]", json.loads(done.stdout))


def test_a_key_is_made_without_rendering_and_compiling(cache_dir: Path) -> None:
    """A key needs no Jinja, no bindings and no torch, and touches no cache folder."""
    process = in_fresh_process("key_of")
    assert process["loaded"] == []
    assert not cache_dir.exists()


def test_a_warm_process_loads_neither_jinja_nor_nvrtc() -> None:
    """A cached kernel loads without Jinja, NVRTC, its bindings or torch."""
    find_or_build(COMBINE)
    process = in_fresh_process("find_or_build")
    assert process == {"built": False, "loaded": []}


def test_every_key_field_has_a_label() -> None:
    """The key has labels for the family, each spec field, each option and the templates."""
    spec = mla_sm80()
    nvrtc = str(find_nvrtc())

    key = key_of(spec)

    labels = [label for label, _ in key.key_fields]
    options = [option.lstrip("-").split("=")[0] for option in options_for(spec.arch, nvrtc)]
    assert labels == [
        "family",
        *(f"spec.{name}" for name in spec.key_fields()),
        *(f"fact.{name}" for name in key_facts(spec)),
        *(f"option.{name}" for name in options),
        "codegen",
        "templates",
    ]
    assert len(set(labels)) == len(labels)
    assert dict(key.key_fields).items() >= {
        ("family", "mla_sm80"),
        ("spec.arch", "sm_90a"),
        ("spec.query_dtype", "bf16"),
        ("spec.page_size", "64"),
        ("fact.shared_bytes", str(spec.shared_bytes)),
        ("option.gpu-architecture", "sm_90a"),
        ("option.std", "c++17"),
        ("option.fmad", "true"),
    }
    assert key.toolchain == nvrtc


def test_an_entry_describes_its_kernel(cache_dir: Path) -> None:
    """The manifest has symbol, spec and ptxas' resources; the cubin is an ELF file."""
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
    _, files = decode_all(entry.path.read_bytes())
    source, origins = files["kernel.cu"].decode(), files["kernel.map"].decode().splitlines()
    assert len(origins) == source.count("\n")
    assert origins[-1].startswith("kernels/combine/kernel.cu.j2:")
    (resources,) = facts["resources"]
    assert resources["symbol"] == "combine"
    assert resources["registers"] > 0
    assert resources["static_shared_bytes"] == 4 * 4 + 4 * 32 * 16  # the struct of combine.cuh


def test_a_kernel_is_looked_up_before_its_lock_and_under_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A miss takes two look-ups, in a call and in a prewarm, and a hit takes one."""
    found: list[bool] = []
    look_up = KernelStore.look_up

    def count(self: KernelStore, key: CacheKey, *, is_dry: bool = False) -> LookUp:
        answer = look_up(self, key, is_dry=is_dry)
        found.append(answer.entry is not None)
        return answer

    monkeypatch.setattr(KernelStore, "look_up", count)
    find_or_build(COMBINE)
    mlagen.prewarm(kernels=COMBINE_STATES)
    find_or_build(COMBINE)
    assert found == [False, False, False, False, True]


def test_building_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A build logs its kernel and its duration at INFO; a hit logs nothing."""
    caplog.set_level(logging.INFO, logger="mlagen")
    find_or_build(COMBINE)
    find_or_build(COMBINE)
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"compiling {COMBINE} with {find_nvrtc()}: absent in {kernel_store().root}"
    assert re.fullmatch(rf"compiled {re.escape(str(COMBINE))} in \d+\.\d s", second)


def test_a_kernel_that_does_not_compile_stores_nothing(templates: Path, cache_dir: Path) -> None:
    """The error has the template's line, no entry appears, and the fixed template builds."""
    role = templates / "kernels/combine/combine.cuh"
    intact = role.read_text()
    line = 1 + intact[: intact.index("__device__")].count("\n")
    role.write_text(intact.replace("__device__", "undefined_type broken; __device__", 1))
    clear_caches()

    with pytest.raises(CompileError) as caught:
        find_or_build(COMBINE)
    left = [path for path in tree(cache_dir) if path.endswith((".cubin", ".json"))]
    role.write_text(intact)
    clear_caches()
    outcome = find_or_build(COMBINE)

    assert f"kernels/combine/combine.cuh:{line} (kernel.cu:" in str(caught.value)
    assert left == []
    assert outcome.built


def test_a_loaded_kernel_is_returned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast path ends in the table of loaded kernels, without a key or a store lookup."""
    loaded = LoadedKernel.__new__(LoadedKernel)
    monkeypatch.setitem(engine._loaded, (COMBINE, 0), loaded)
    monkeypatch.setattr(engine, "find_or_build", None)
    assert kernel_for(COMBINE, 0) is loaded


def test_threads_load_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many concurrent threads, one loads and all get the same object."""
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
