"""No arrival at a barrier overtakes what its warp still reads of shared memory.

A warp that has read a stage of a ring arrives at its barrier, and the next copy may come. Arrivals
do not wait for ldmatrix by themselves: only for a value that they are given.
"""

from __future__ import annotations

import pytest

from mlagen.artifacts import Source
from mlagen.codegen.render import render
from mlagen.compiler.nvrtc import compile_source
from mlagen.compiler.toolchain import find_nvrtc
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.built_once import cubin_of
from tests.kernels import gqa_sm90, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv
from tests.sass import nvdisasm_is_missing, overtaken

pytestmark = pytest.mark.skipif(
    nvdisasm_is_missing(), reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)

KERNELS: list[KernelSpec] = [
    gqa_sm90(rows=rows, head_dim=head_dim, kv_dtype=kv_dtype, page_size=64)
    for rows in (8, 16, 32)
    for head_dim in (64, 128, 256)
    for kv_dtype in (DType.BF16, DType.E4M3)
    if rows * head_dim <= 32 * 128
]
KERNELS += [
    gqa_sm90(kv_dtype=DType.E4M3, kv_heads_per_cta=2),
    mla_sm90(rows=16),
    mla_sm90(rows=64),
    mla_sm90(rows=64, lookup="sparse"),
    mla_sm90_fp8(rows=16),
    mla_sm90_fp8(rows=64),
    *(build(rows=64, qk_rope_head_dim=0) for build in (mla_sm90, mla_sm90_fp8)),
    mla_sm90_fp8kv(rows=16),
    mla_sm90_fp8kv(rows=64),
    *(
        mla_sm90_fp8kv(query_dtype=DType.E4M3, lookup="paged", qk_rope_head_dim=rope)
        for rope in (64, 0)
    ),
]


@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_no_arrival_overtakes_ldmatrix(spec: KernelSpec) -> None:
    """On every path, each read that an arrive releases completes before it."""
    compiled = cubin_of(spec)
    assert overtaken(compiled.code) == []


def test_an_arrival_that_is_given_nothing_overtakes() -> None:
    """Without a value to wait for, compilers leave it to chance: the test above would see it."""
    spec = gqa_sm90(rows=16, page_size=64)
    text = render(spec).text
    given = "  if (lane_index() == 0) arrive_after_reads(empty, read);\n"
    assert text.count(given) == 1
    source = Source(
        text=text.replace(given, given.replace("arrive_after_reads(empty, read)", "arrive(empty)")),
        origins=(),
    )

    found = overtaken(compile_source(source, spec.arch, find_nvrtc()).code)

    assert {read.split(".")[0] for _, read in found} == {"LDSM"}
