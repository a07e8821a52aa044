"""A cache of thousands of kernels, made in seconds from hard links without compiling."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from mlagen.artifacts import Cubin, Resources, Source, build_of
from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout

TOOLCHAIN = "nvrtc-13.5.37"
_SIZES = dict.fromkeys(("stack_bytes", "spill_store_bytes", "spill_load_bytes"), 0)
_RESOURCES = Resources(symbol="combine", registers=32, static_shared_bytes=2064, **_SIZES)
_OPTIONS = {"gpu-architecture": "sm_90a", "no-cache": "", "std": "c++17", "fmad": "true"}


def fill(root: Path, count: int) -> list[str]:
    """Fill a new cache folder with ``count`` valid kernels; return their keys.

    They differ in the head dim, and share their files by hard links.
    """
    source = Source(text="// a kernel\n" * 200, origins=("kernel.cuh:1",) * 200)
    code = b"\x7fELF" + bytes(4096)
    cubin = Cubin(code=code, log="", resources=(_RESOURCES,), toolchain=TOOLCHAIN, compile_ms=97.7)
    build = build_of(source, cubin, spec={}, symbol="combine", shared_bytes=0)
    root.mkdir(mode=0o700)
    for name, content in build.files.items():
        (root / name).write_bytes(content)
    sample, keys = None, []
    for number in range(count):
        spec = {"arch": "sm_90a", "dtype": "bf16", "head_dim_vo": str(number)}
        key = CacheKey(
            (
                ("family", "combine"),
                *((f"spec.{name}", value) for name, value in spec.items()),
                *((f"option.{name}", value) for name, value in _OPTIONS.items()),
                ("templates", "0" * 64),
            ),
            TOOLCHAIN,
        )
        sample = sample or Manifest.of(key, build, created_by="prewarm")
        facts = {**sample.facts, "kernel": {**sample.facts["kernel"], "spec": spec}}
        manifest = replace(sample, key=key.digest, key_fields=key.key_fields, facts=facts)
        folder = os.fspath(Layout(root).entry(key.digest, TOOLCHAIN))
        os.makedirs(folder, mode=0o700)  # noqa: PTH103 - of thousands, no path for each
        with open(f"{folder}/manifest.json", "wb") as file:  # noqa: PTH123
            file.write(manifest.to_json())
        for name in build.files:
            os.link(f"{root}/{name}", f"{folder}/{name}")
        keys.append(key.digest)
    return keys
