"""Measure the costs of the kernel cache: ``python -m tests.cache_costs`` prints medians in ms.

A real kernel is compiled once; its cubin is then published, found and looked up many times on the
disk of the temporary folder (``TMPDIR``).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from mlagen import engine
from mlagen.artifacts import Build
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from mlagen.codegen import sources
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.arch import parse_arch
from mlagen.spec.families import specs_of
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm80 import MlaSm80Spec

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Print the costs as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(costs(Path(folder)), indent=1))  # noqa: T201


def costs(folder: Path, *, repeats: int = 50) -> dict[str, float]:
    """Return the median costs, in milliseconds unless the key has another unit."""
    spec = specs_of(parse_arch("sm_90a"), ["mla_sm80"], query_dtype=["bf16"])[0]
    build = engine.build_spec(spec, find_nvrtc())
    keys = [_other(engine.key_of(spec), number) for number in range(repeats)]
    store = KernelStore(folder / "cache", lock_dir=folder / "locks", lock_timeout_s=60.0)
    publish = [_ms(lambda key=key: _publish(store, key, build)) for key in keys]  # type: ignore[misc]
    find = [_ms(lambda key=key: store.find(key)) for key in keys]  # type: ignore[misc]
    miss = [_ms(lambda: store.look_up(_other(engine.key_of(spec), -1))) for _ in range(repeats)]
    others = [_paged(spec, number) for number in range(1, repeats)]
    sources.template_digest.cache_clear()
    sources._code_digest.cache_clear()
    first_key = _ms(lambda: engine.key_of(others[0]))
    return {
        "entry KiB": round(sum(map(len, build.files.values())) / 1024, 1),
        "find, verified": _median(find),
        "look for what is absent": _median(miss),
        "publish with lock and flushes": _median(publish),
        "first key of a process, with the digest of the templates": round(first_key, 3),
        "key of a warm process": _median([_ms(lambda o=o: engine.key_of(o)) for o in others[1:]]),  # type: ignore[misc]
        "`mlagen cache ls`, cold start": _median([_ms(_list) for _ in range(5)]),
    }


def _other(key: CacheKey, number: int) -> CacheKey:
    return CacheKey((*key.key_fields, ("number", str(number))), key.toolchain)


def _paged(spec: KernelSpec, number: int) -> KernelSpec:
    assert isinstance(spec, MlaSm80Spec)
    return replace(spec, variant=replace(spec.variant, page_size=1000 + number))


def _publish(store: KernelStore, key: CacheKey, build: Build) -> object:
    made = replace(build, toolchain=key.toolchain)
    return store.build(key, lambda: made, created_by="jit", because="absent")


def _list() -> object:
    command = [sys.executable, "-m", "cache_tools", "cache", "ls"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def _ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def _median(samples: list[float]) -> float:
    return round(statistics.median(samples), 3)


if __name__ == "__main__":
    main()
