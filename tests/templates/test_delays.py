"""The delays of tests on a GPU are in places that kernels have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.gpu import test_gqa_hopper, test_mla_hopper
from tests.kernels import gqa_hopper, mla_hopper, mla_hopper_e4m3, mla_hopper_packed
from tests.launch_repeats import delayed_source

GQA, MLA = test_gqa_hopper.DELAYS, test_mla_hopper.DELAYS
KERNELS: dict[str, tuple[KernelSpec, Mapping[str, int], str]] = {
    "gqa_hopper": (gqa_hopper(), GQA, "  __syncwarp();\n"),
    "gqa_hopper, several heads": (
        gqa_hopper(kv_dtype=DType.E4M3, block_heads=2),
        GQA,
        "  __syncwarp();\n",
    ),
    "gqa_hopper, 32 rows": (gqa_hopper(rows=32), GQA, "  __syncwarp();\n"),
    "mla_hopper": (mla_hopper(), MLA, ""),
    "mla_hopper_e4m3": (mla_hopper_e4m3(), MLA, ""),
    "mla_hopper_packed": (mla_hopper_packed(), MLA, ""),
}


@pytest.mark.parametrize(("spec", "delays", "after"), KERNELS.values(), ids=KERNELS)
def test_a_kernel_with_delays_compiles(
    spec: KernelSpec, delays: Mapping[str, int], after: str
) -> None:
    """And every delay is in it."""
    source = delayed_source(spec, delays, after=after)

    assert source.text.count("__nanosleep(") >= len(delays)
    assert compile_source(source, spec.arch, find_nvrtc()).code
