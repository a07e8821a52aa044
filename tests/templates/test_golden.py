"""Golden files: two rendered kernels, and a manifest of one kernel of each family."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mlagen.codegen.render import render
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.built_once import cubin_of
from tests.kernels import (
    COMBINE,
    WIDE_DECODE,
    gqa_sm80,
    gqa_sm90,
    mla_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
)

GOLDEN = Path(__file__).parent / "golden"
GQA_SM80 = gqa_sm80(kv_dtype=DType.E4M3)
FAMILIES = [
    COMBINE,
    GQA_SM80,
    gqa_sm90(),
    WIDE_DECODE,
    mla_sm90(),
    mla_sm90_fp8(rows=64),
    mla_sm90_fp8kv(),
]


def require_equal(file: Path, text: str) -> None:
    """Compare with a file in git; `MLAGEN_ACCEPT=1 pytest tests/templates` renews it."""
    if os.environ.get("MLAGEN_ACCEPT") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert file.read_text() == text


def manifest_of(spec: KernelSpec, recorded: dict[str, Any]) -> dict[str, Any]:
    """Return what a kernel is rendered from and how much of an SM it takes.

    The resources are those of one NVRTC: under another, they are as ``recorded``.
    """
    source, nvrtc = render(spec), find_nvrtc()
    files = [origin.partition(":")[0] for origin in source.origins]
    manifest: dict[str, Any] = {
        "spec": str(spec),
        "sha256": sha256(source.text.encode()).hexdigest(),
        "shared_bytes": spec.shared_bytes,
        "files": list(dict.fromkeys(filter(None, files))),
    }
    if recorded.get("nvrtc", nvrtc.version) != nvrtc.version and "MLAGEN_ACCEPT" not in os.environ:
        return manifest | {name: recorded[name] for name in ("nvrtc", "resources")}
    (resources,) = cubin_of(spec).resources
    return manifest | {"nvrtc": nvrtc.version, "resources": asdict(resources)}


@pytest.mark.parametrize("spec", [COMBINE, GQA_SM80], ids=lambda spec: spec.family)
def test_a_rendered_kernel_is_as_it_was_read_last(spec: KernelSpec) -> None:
    """The text is the one in git."""
    require_equal(GOLDEN / f"{spec.family}.{spec.arch}.cu", render(spec).text)


@pytest.mark.parametrize("spec", FAMILIES, ids=lambda spec: spec.family)
def test_a_kernel_is_made_of_the_recorded_files_and_takes_the_recorded_resources(
    spec: KernelSpec,
) -> None:
    """Files, text, registers and shared memory are those of the manifest in git."""
    file = GOLDEN / f"{spec.family}.{spec.arch}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}
    require_equal(file, json.dumps(manifest_of(spec, recorded), indent=1) + "\n")
