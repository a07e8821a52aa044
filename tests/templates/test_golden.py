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
from mlagen.engine import _key_of
from mlagen.spec.kernel import KernelSpec
from tests.built_once import cubin_of
from tests.kernels import KERNELS

GOLDEN = Path(__file__).parent / "golden"
FIXED = "nvrtc-13.5.37"


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
        "key": _key_of(spec, FIXED).digest,
        "sha256": sha256(source.text.encode()).hexdigest(),
        "shared_bytes": spec.shared_bytes,
        "files": list(dict.fromkeys(filter(None, files))),
    }
    if recorded.get("nvrtc", nvrtc.version) != nvrtc.version and "MLAGEN_ACCEPT" not in os.environ:
        return manifest | {name: recorded[name] for name in ("nvrtc", "resources")}
    (resources,) = cubin_of(spec).resources
    return manifest | {"nvrtc": nvrtc.version, "resources": asdict(resources)}


@pytest.mark.parametrize("family", ["combine", "gqa_sm80"])
def test_a_rendered_kernel_is_as_it_was_read_last(family: str) -> None:
    """The text is the one in git."""
    spec = KERNELS[family]
    require_equal(GOLDEN / f"{spec.family}.{spec.arch}.cu", render(spec).text)


@pytest.mark.parametrize("spec", KERNELS.values(), ids=KERNELS)
def test_a_kernel_is_made_of_the_recorded_files_and_takes_the_recorded_resources(
    spec: KernelSpec,
) -> None:
    """Key, files, text, registers and shared memory are those of the manifest in git.

    One key has one text: codegen that renders another increases ``CODEGEN``, and all keys change.
    """
    file = GOLDEN / f"{spec.family}.{spec.arch}.json"
    recorded = json.loads(file.read_text()) if file.exists() else {}
    manifest = manifest_of(spec, recorded)
    if manifest["key"] == recorded.get("key"):
        assert manifest["sha256"] == recorded["sha256"], "increase CODEGEN in codegen/sources.py"
    require_equal(file, json.dumps(manifest, indent=1) + "\n")
