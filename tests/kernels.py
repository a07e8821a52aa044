"""Kernels that tests compile, SM counts of GPUs, and a copy of the templates to edit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlagen import engine
from mlagen.codegen import render, sources
from mlagen.compiler.nvrtc import supported_archs
from mlagen.compiler.toolchain import find_nvrtc, wanted_toolchain
from mlagen.spec.arch import Arch, parse_arch
from mlagen.spec.combine import CombineSpec, CombineStatesSpec
from mlagen.spec.dtype import DType
from mlagen.spec.gqa.sm80 import GqaSm80Spec, gqa_sm80_spec
from mlagen.spec.gqa.sm90 import GqaSm90Spec, gqa_sm90_spec
from mlagen.spec.gqa.variant import GqaVariant
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla.sm80 import MlaSm80Spec, mla_sm80_spec
from mlagen.spec.mla.sm90 import (
    MlaSm90Fp8KvSpec,
    MlaSm90Fp8Spec,
    MlaSm90Spec,
)
from mlagen.spec.mla.variant import MlaVariant
from mlagen.spec.write_rows import WriteRowsSpec

SM_80 = parse_arch("sm_80")
SM_90A = parse_arch("sm_90a")

# Of partitions, half an H100, H20, A100, H100 PCIe, H100 and H200, and a whole GH100.
SM_COUNTS = (1, 2, 16, 66, 78, 108, 114, 132, 144)


def mla_sm80(*, arch: Arch = SM_90A, rows: int = 16, **changes: Any) -> MlaSm80Spec:
    """Return the sm80 bf16 kernel of DeepSeek-V3 for ``rows`` rows, with some fields replaced."""
    variant = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
    return mla_sm80_spec(arch, replace(variant, **changes), rows)


def mla_sm90(*, rows: int = 16, **changes: Any) -> MlaSm90Spec:
    """Return the sm90 bf16 kernel of DeepSeek-V3 for ``rows`` rows, with some fields replaced."""
    variant = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16)
    spec = MlaSm90Spec.of(SM_90A, replace(variant, **changes), rows)
    assert spec is not None
    return spec


def mla_sm90_fp8(*, rows: int = 16, **changes: Any) -> MlaSm90Fp8Spec:
    """Return the sm90 e4m3 kernel of DeepSeek-V3 for ``rows`` rows, with some fields replaced."""
    variant = MlaVariant(query_dtype=DType.E4M3, kv_dtype=DType.E4M3)
    spec = MlaSm90Fp8Spec.of(SM_90A, replace(variant, **changes), rows)
    assert spec is not None
    return spec


def mla_sm90_fp8kv(*, rows: int = 64, **changes: Any) -> MlaSm90Fp8KvSpec:
    """Return the sm90 sparse fp8_ds_mla kernel for ``rows`` rows, with some fields replaced."""
    variant = MlaVariant(query_dtype=DType.BF16, kv_dtype=DType.FP8_DS_MLA, lookup="sparse")
    spec = MlaSm90Fp8KvSpec.of(SM_90A, replace(variant, **changes), rows)
    assert spec is not None
    return spec


def mla_sm90_two_pools(*, rows: int = 64, kv_dtype: DType = DType.FP8_DSV4) -> MlaSm90Fp8KvSpec:
    """Return the sm90 kernel of DeepSeek-V4 for ``rows`` rows, or of another format."""
    facts: dict[str, Any] = {"kv_dtype": kv_dtype, "lookup": "two_pools"}
    return mla_sm90_fp8kv(rows=rows, qk_rope_head_dim=0, page_size=0, **facts)


def gqa_sm80(*, arch: Arch = SM_90A, rows: int = 16, **changes: Any) -> GqaSm80Spec:
    """Return the sm80 bf16 kernel of Llama 3 for ``rows`` rows, with some fields replaced."""
    variant = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)
    return gqa_sm80_spec(arch, replace(variant, **changes), rows)


def gqa_sm90(
    *, rows: int = 8, kv_heads_per_cta: int = 1, has_unaligned_rows: bool = False, **changes: Any
) -> GqaSm90Spec:
    """Return the sm90 bf16 kernel of Llama 3 for ``rows`` rows, with some fields replaced."""
    variant = GqaVariant(query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16)
    facts = {"has_unaligned_rows": has_unaligned_rows}
    spec = gqa_sm90_spec(SM_90A, replace(variant, **changes), rows, **facts)
    assert spec is not None
    return replace(spec, kv_heads_per_cta=kv_heads_per_cta)


def write_rows(**changes: Any) -> WriteRowsSpec:
    """Return the kernel that writes bf16 tokens of DeepSeek-V4, with some fields replaced."""
    row: dict[str, Any] = {"kv_dtype": DType.FP8_DSV4, "pool": "first", "head_dim_qk": 512}
    return WriteRowsSpec(**{"arch": SM_90A, "dtype": DType.BF16, **row, **changes})


DECODE = mla_sm80()  # compiles for a second, in which tests interfere
WIDE_DECODE = mla_sm80(rows=128)
COMBINE = CombineSpec(arch=SM_80, dtype=DType.BF16, head_dim_vo=512)
COMBINE_STATES = CombineStatesSpec(arch=SM_80, dtype=DType.BF16, head_dim_vo=512)
WRITE_ROWS = write_rows(arch=SM_80)
# One kernel of each family.
KERNELS: dict[str, KernelSpec] = {
    spec.family: spec
    for spec in (
        WIDE_DECODE,
        mla_sm90(),
        mla_sm90_fp8(rows=64),
        mla_sm90_fp8kv(),
        gqa_sm80(kv_dtype=DType.E4M3),
        gqa_sm90(),
        COMBINE,
        COMBINE_STATES,
        WRITE_ROWS,
    )
}


def require_known(arch: Arch) -> None:
    """Skip the test if the installed NVRTC does not support ``arch``."""
    if arch.number not in supported_archs(find_nvrtc()):
        pytest.skip(f"NVRTC {find_nvrtc().version} does not know {arch}")


def complaints(stderr: str) -> list[str]:
    """Return the stderr lines of a compiling process, without the warning of slow compilations.

    A busy machine may cause that warning.
    """
    return [line for line in stderr.splitlines() if " so far; compile ahead of time" not in line]


def copy_templates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make mlagen read its templates from a copy in ``folder``; ``clear_caches`` after an edit."""
    copy = folder / "templates"
    shutil.copytree(sources.template_root(), copy)
    for module in (sources, render, engine):
        monkeypatch.setattr(module, "template_root", lambda: copy)
    return copy


def clear_caches() -> None:
    """Clear the caches of templates and toolchain."""
    render.environment.cache_clear()
    sources.template_inputs.cache_clear()
    find_nvrtc.cache_clear()
    wanted_toolchain.cache_clear()
    wanted_toolchain.cache_clear()
    engine._key_of.cache_clear()
