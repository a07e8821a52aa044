"""Products find their descriptors where they want them: in registers of the whole warp.

Where compilers do not know that all lanes have the same, four instructions beside each product move
its two descriptors there, and the loop takes longer. Which of them know it differs from version to
version.
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
from tests.kernels import mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv
from tests.sass import moves_between_mmas, nvdisasm_is_missing

pytestmark = pytest.mark.skipif(
    nvdisasm_is_missing(), reason="needs nvdisasm: pip install nvidia-cuda-nvdisasm"
)

KERNELS: list[KernelSpec] = [
    *(mla_sm90(rows=64, lookup=lookup) for lookup in ("paged", "sparse")),
    mla_sm90(rows=64, qk_rope_head_dim=0),
    *(mla_sm90_fp8(rows=rows) for rows in (16, 64)),
    mla_sm90_fp8(rows=64, qk_rope_head_dim=0),
    *(mla_sm90_fp8kv(rows=rows) for rows in (16, 64)),
    *(
        mla_sm90_fp8kv(query_dtype=DType.E4M3, lookup="paged", qk_rope_head_dim=rope)
        for rope in (64, 0)
    ),
    mla_sm90_fp8kv(qk_rope_head_dim=0),
]


@pytest.mark.parametrize("spec", KERNELS, ids=str)
def test_no_descriptor_is_moved_between_products(spec: KernelSpec) -> None:
    """All that a group of products needs is there when it begins."""
    compiled = cubin_of(spec)
    assert moves_between_mmas(compiled.code) == 0


def test_descriptors_that_compilers_do_not_know_of_are_moved() -> None:
    """Without `warp_uniform`, the compiler moves descriptors to uniform registers at every use."""
    spec = mla_sm90_fp8kv(rows=64)
    text = render(spec).text
    uniform = "return __reduce_max_sync(~0u, value);"
    assert text.count(uniform) == 1
    source = Source(text=text.replace(uniform, "return value;"), origins=())
    compiled = compile_source(source, spec.arch, find_nvrtc())
    assert moves_between_mmas(compiled.code) > 0
