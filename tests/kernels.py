"""Kernels that tests compile for real, and the template folder as a copy that tests may break."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlagen.codegen import environment, sources
from mlagen.compiler.nvrtc_library import load_nvrtc
from mlagen.compiler.toolchain import find_nvrtc, wanted_toolchain
from mlagen.spec.arch import Arch, parse_arch
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import GqaDecodeSpec, GqaVariant, gqa_decode_spec
from mlagen.spec.gqa_hopper import GqaHopperSpec, gqa_hopper_spec
from mlagen.spec.mla import MlaDecodeSpec, mla_decode_spec
from mlagen.spec.mla_hopper import MlaHopperSpec, mla_hopper_spec
from mlagen.spec.mla_hopper_e4m3 import MlaHopperE4m3Spec, mla_hopper_e4m3_spec
from mlagen.spec.mla_hopper_packed import MlaHopperPackedSpec, mla_hopper_packed_spec
from mlagen.spec.mla_support import MlaVariant

SM_80 = parse_arch("sm_80")
SM_90A = parse_arch("sm_90a")


def mla_decode(*, arch: Arch = SM_90A, rows: int = 16, **changes: Any) -> MlaDecodeSpec:
    """Return the bf16 decode kernel of DeepSeek-V3 for ``rows`` rows, some facts changed."""
    variant = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
    return mla_decode_spec(arch, replace(variant, **changes), rows)


def mla_hopper(*, rows: int = 16, **changes: Any) -> MlaHopperSpec:
    """Return the bf16 Hopper kernel of DeepSeek-V3 for ``rows`` rows, some facts changed."""
    variant = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
    spec = mla_hopper_spec(SM_90A, replace(variant, **changes), rows)
    assert spec is not None
    return spec


def mla_hopper_e4m3(*, rows: int = 16, **changes: Any) -> MlaHopperE4m3Spec:
    """Return the e4m3 Hopper kernel of DeepSeek-V3 for ``rows`` rows, some facts changed."""
    variant = MlaVariant(query_dtype=DType.E4M3, kv_dtype=DType.E4M3)
    spec = mla_hopper_e4m3_spec(SM_90A, replace(variant, **changes), rows)
    assert spec is not None
    return spec


def mla_hopper_packed(*, rows: int = 64, **changes: Any) -> MlaHopperPackedSpec:
    """Return the Hopper kernel over lists of 656-byte rows, some facts changed."""
    variant = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.PACKED656, lookup="sparse")
    spec = mla_hopper_packed_spec(SM_90A, replace(variant, **changes), rows)
    assert spec is not None
    return spec


def gqa_decode(*, arch: Arch = SM_90A, rows: int = 16, **changes: Any) -> GqaDecodeSpec:
    """Return the bf16 decode kernel of Llama 3 for ``rows`` rows, some facts changed."""
    variant = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)
    return gqa_decode_spec(arch, replace(variant, **changes), rows)


def gqa_hopper(*, rows: int = 8, block_heads: int = 1, **changes: Any) -> GqaHopperSpec:
    """Return the bf16 Hopper kernel of Llama 3 for ``rows`` rows, some facts changed."""
    variant = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)
    spec = gqa_hopper_spec(SM_90A, replace(variant, **changes), rows)
    assert spec is not None
    return replace(spec, block_heads=block_heads)


# The one that takes longest to compile, and the one that takes least.
WIDE_DECODE = mla_decode(rows=128)
COMBINE = CombineSplitsSpec(arch=SM_80, dtype=DType.BF16, head_dim_vo=512)


def require_known(arch: Arch) -> None:
    """Skip the test where the installed NVRTC does not compile for ``arch``."""
    if arch.number not in load_nvrtc(find_nvrtc().path).supported_archs():
        pytest.skip(f"NVRTC {find_nvrtc().version} does not know {arch}")


def complaints(stderr: str) -> list[str]:
    """Return the lines of a process that compiled, but for what a busy machine adds.

    There, a compilation may take so long that a warning says so.
    """
    return [line for line in stderr.splitlines() if " so far; compile ahead of time" not in line]


def copy_templates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make mlagen read its templates from a copy in ``folder``; call ``forget`` after an edit."""
    copy = folder / "templates"
    shutil.copytree(sources.template_root(), copy)
    for module in (sources, environment):
        monkeypatch.setattr(module, "template_root", lambda: copy)
    return copy


def forget() -> None:
    """Clear what a process remembers of templates and toolchain."""
    from mlagen import engine

    environment.environment.cache_clear()
    sources.template_digest.cache_clear()
    find_nvrtc.cache_clear()
    wanted_toolchain.cache_clear()
    wanted_toolchain.cache_clear()
    engine._key_of.cache_clear()
