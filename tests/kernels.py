"""Kernels that tests compile for real, and the template folder as a copy that tests may break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from mlagen.codegen import environment, sources
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.arch import Arch, parse_arch
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.dtype import DType
from mlagen.spec.mla import MlaDecodeSpec, mla_decode_spec

SM_80 = parse_arch("sm_80")
SM_90A = parse_arch("sm_90a")


def mla_decode(*, arch: Arch = SM_90A, rows: int = 16, page_size: int = 64) -> MlaDecodeSpec:
    """Return the bf16 decode kernel of DeepSeek-V3's dimensions for requests of ``rows`` rows."""
    return mla_decode_spec(
        arch=arch,
        query_dtype=DType.BF16,
        kv_dtype=DType.BF16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=page_size,
        rows=rows,
    )


# The one that takes longest to compile, and the one that takes least.
WIDE_DECODE = mla_decode(rows=128)
COMBINE = CombineSplitsSpec(arch=SM_80, dtype=DType.BF16, head_dim_vo=512)


def require_known(arch: Arch) -> None:
    """Skip the test where the installed NVRTC does not compile for ``arch``."""
    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    if arch.number not in numbers:
        pytest.skip(f"NVRTC {find_nvrtc().version} does not know {arch}")


def copy_templates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make mlagen read its templates from a copy in ``folder``; call ``forget`` after an edit."""
    copy = folder / "templates"
    shutil.copytree(sources.template_root(), copy)
    for module in (sources, environment):
        monkeypatch.setattr(module, "template_root", lambda: copy)
    return copy


def forget() -> None:
    """Clear what a process remembers of templates and toolchain."""
    from mlagen.engine import key_of

    environment.environment.cache_clear()
    sources.template_digest.cache_clear()
    find_nvrtc.cache_clear()
    key_of.cache_clear()
