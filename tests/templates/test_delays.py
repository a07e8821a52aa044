"""The delays of tests on a GPU are in places that kernels have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mlagen.compiler.nvrtc import compile_to_ptx
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.kernels import gqa_sm90, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv, mla_sm90_two_pools
from tests.launch_repeats import GQA_DELAYS as GQA
from tests.launch_repeats import MLA_DELAYS as MLA
from tests.launch_repeats import delayed_source

KERNELS: dict[str, tuple[KernelSpec, Mapping[str, int], str]] = {
    "gqa_sm90": (gqa_sm90(), GQA, "  __syncwarp();\n"),
    "gqa_sm90, several heads": (
        gqa_sm90(kv_dtype=DType.E4M3, kv_heads_per_cta=2),
        GQA,
        "  __syncwarp();\n",
    ),
    "gqa_sm90, 32 rows": (gqa_sm90(rows=32), GQA, "  __syncwarp();\n"),
    "mla_sm90": (mla_sm90(), MLA, ""),
    "mla_sm90, lists": (mla_sm90(lookup="sparse"), MLA, ""),
    "mla_sm90_fp8": (mla_sm90_fp8(), MLA, ""),
    "mla_sm90_fp8kv": (mla_sm90_fp8kv(), MLA, ""),
    "mla_sm90_fp8kv, two pools": (mla_sm90_two_pools(), MLA, ""),
}


@pytest.mark.parametrize(("spec", "delays", "after"), KERNELS.values(), ids=KERNELS)
def test_every_delay_is_in_its_kernel(
    spec: KernelSpec, delays: Mapping[str, int], after: str
) -> None:
    """The lines that it stands before are lines of the kernel."""
    assert delayed_source(spec, delays, after=after).text.count("__nanosleep(") >= len(delays)


@pytest.mark.parametrize("name", ["gqa_sm90", "mla_sm90"])
def test_a_kernel_with_delays_compiles(name: str) -> None:
    """Its code has them."""
    spec, delays, after = KERNELS[name]
    source = delayed_source(spec, delays, after=after)
    assert compile_to_ptx(source, spec.arch, find_nvrtc()).count("nanosleep") >= len(delays)
