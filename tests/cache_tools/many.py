"""A cache of thousands of kernels, made in seconds from hard links without compiling."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from mlagen.artifacts import Cubin, Resources, Source, build_of
from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from mlagen.cache.layout import Layout

TOOLCHAIN = "nvrtc-13.5.37"

_SPEC = {"arch": "sm_90a", "dtype": "bf16", "head_dim_vo": "NUMBER"}
_RESOURCES = Resources(
    symbol="combine",
    registers=32,
    stack_bytes=0,
    spill_store_bytes=0,
    spill_load_bytes=0,
    static_shared_bytes=2064,
)


def fill(root: Path, count: int) -> list[str]:
    """Fill a new cache folder with ``count`` valid kernels; return their keys.

    They differ in the head dim, and share their files by hard links.
    """
    build = build_of(
        Source(text="// a kernel\n" * 200, origins=("kernel.cuh:1",) * 200),
        Cubin(
            code=b"\x7fELF" + bytes(4096),
            log="",
            resources=(_RESOURCES,),
            toolchain=TOOLCHAIN,
            compile_ms=97.7,
        ),
        spec=_SPEC,
        symbol=_RESOURCES.symbol,
        shared_bytes=0,
    )
    root.mkdir(mode=0o700)
    for name, content in build.files.items():
        (root / name).write_bytes(content)
    sample = Manifest.of(_key("NUMBER"), build, created_by="prewarm")
    body = {**json.loads(sample.to_json()), "key": "DIGEST", "seal": "SEAL"}
    text = json.dumps(body, indent=1, sort_keys=True)
    del body["seal"]
    sealed = json.dumps(body, sort_keys=True)
    keys = [_key(str(number)).digest for number in range(count)]
    for number, key in enumerate(keys):
        folder = os.fspath(Layout(root).entry(key, TOOLCHAIN))
        os.makedirs(folder, mode=0o700)  # noqa: PTH103 - of thousands, no path for each
        own = [
            part.replace("DIGEST", key).replace("NUMBER", str(number)) for part in (sealed, text)
        ]
        seal = hashlib.sha256(own[0].encode()).hexdigest()
        with open(f"{folder}/manifest.json", "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(own[1].replace("SEAL", seal))
        for name in build.files:
            os.link(f"{root}/{name}", f"{folder}/{name}")
    return keys


def _key(number: str) -> CacheKey:
    spec = {**_SPEC, "head_dim_vo": number}
    options = {"gpu-architecture": "sm_90a", "no-cache": "", "std": "c++17", "fmad": "true"}
    key_fields = {
        "family": "combine",
        **{f"spec.{name}": value for name, value in spec.items()},
        **{f"option.{name}": value for name, value in options.items()},
        "templates": "0" * 64,
    }
    return CacheKey(tuple(key_fields.items()), TOOLCHAIN)
