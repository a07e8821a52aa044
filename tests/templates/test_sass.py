"""SASS of the sm90 kernels: no arrival overtakes reads of shared memory, no descriptor is moved.

A warp that has read a stage of a ring arrives at its barrier, and the next copy may come. Arrivals
do not wait for ldmatrix by themselves: only for a value that they are given.

Where a compiler does not know that all lanes have the same descriptors, four instructions beside
each MMA move its two to uniform registers, and the loop takes longer. Which of them know it differs
from version to version.
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
from tests.kernels import gqa_sm90, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv, mla_sm90_two_pools
from tests.sass import (
    moves_between_mmas,
    nvdisasm_is_missing,
    overtaken,
    stores_before_semaphores,
)

pytestmark = pytest.mark.skipif(
    nvdisasm_is_missing(), reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)

WITH_DESCRIPTORS: list[KernelSpec] = [
    *(mla_sm90(rows=64, lookup=lookup) for lookup in ("paged", "sparse")),
    *(mla_sm90_fp8(rows=rows) for rows in (16, 64)),
    *(build(rows=64, qk_rope_head_dim=0) for build in (mla_sm90, mla_sm90_fp8)),
    *(mla_sm90_fp8kv(rows=rows) for rows in (16, 64)),
    *(
        mla_sm90_fp8kv(query_dtype=DType.E4M3, lookup="paged", qk_rope_head_dim=rope)
        for rope in (64, 0)
    ),
    mla_sm90_fp8kv(qk_rope_head_dim=0),
    *(
        mla_sm90_two_pools(rows=rows, kv_dtype=kv_dtype)
        for rows in (16, 64)
        for kv_dtype in (DType.FP8_DSV4, DType.FP8_DSV41)
    ),
]
# The loops of tiles between the smallest and the largest are those of one of them.
KERNELS: list[KernelSpec] = [
    *(
        gqa_sm90(rows=rows, head_dim=head_dim, kv_dtype=kv_dtype)
        for head_dim, rows in ((64, 32), (128, 8), (128, 32), (256, 8), (256, 16))
        for kv_dtype in (DType.BF16, DType.E4M3)
    ),
    *(gqa_sm90(rows=rows, kv_dtype=DType.NVFP4) for rows in (8, 32)),
    gqa_sm90(rows=32, kv_dtype=DType.INT8_PER_TOKEN_HEAD),
    gqa_sm90(kv_dtype=DType.INT8_PER_TOKEN_HEAD, has_unaligned_rows=True),
    gqa_sm90(kv_dtype=DType.INT8, kv_heads_per_cta=2),
    gqa_sm90(has_soft_cap=True),
    gqa_sm90(has_dcp=True, separate_page_ids=True),
    gqa_sm90(page_size=128, sparse_block=128),
    gqa_sm90(rows=16, head_dim=256, sparse_block=1, has_output_gate=True),
    mla_sm90(rows=16),
    *WITH_DESCRIPTORS,
]


def code_of_changed(spec: KernelSpec, old: str, new: str) -> bytes:
    """Return the cubin of a kernel with another text in place of one that it has once."""
    text = render(spec).text
    assert text.count(old) == 1
    source = Source(text=text.replace(old, new), origins=())
    return compile_source(source, spec.arch, find_nvrtc()).code


@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_no_arrival_overtakes_ldmatrix(spec: KernelSpec) -> None:
    """On every path, each read that an arrive releases completes before it."""
    assert overtaken(cubin_of(spec).code) == []


def test_an_arrival_that_is_given_nothing_overtakes() -> None:
    """Without a value to wait for, compilers leave it to chance: the test above would see it."""
    given = "  if (lane_index() == 0) arrive_after_reads(empty, read);\n"
    changed = given.replace("arrive_after_reads(empty, read)", "arrive(empty)")

    found = overtaken(code_of_changed(gqa_sm90(rows=16, page_size=64), given, changed))

    assert {read.split(".")[0] for _, read in found} == {"LDSM"}


@pytest.mark.parametrize("spec", WITH_DESCRIPTORS, ids=str)
def test_no_descriptor_is_moved_between_mmas(spec: KernelSpec) -> None:
    """All that a group of MMAs needs is there when it begins."""
    assert moves_between_mmas(cubin_of(spec).code) == 0


def test_descriptors_that_compilers_do_not_know_of_are_moved() -> None:
    """Without `warp_uniform`, the compiler moves descriptors to uniform registers at every use."""
    uniform = "return __reduce_max_sync(~0u, value);"

    code = code_of_changed(mla_sm90_fp8kv(rows=16), uniform, "return value;")

    assert moves_between_mmas(code) > 0


def test_unsplit_rows_of_short_lists_are_stored_before_the_code_of_splits() -> None:
    """A CTA may have one work item, and code near the main loop is in the I-cache by then."""
    spec = mla_sm90_two_pools(rows=64)
    stores_of_a_thread = 64  # of two elements: a quarter of the rows, in four tiles of dims
    is_unsplit = "kHasTwoPools && !__any_sync(~0u, work.num_splits != 1)"

    without = code_of_changed(spec, is_unsplit, "false")

    assert stores_before_semaphores(cubin_of(spec).code) >= stores_of_a_thread
    assert stores_before_semaphores(without) < stores_of_a_thread
