"""Tests of the spec of the combine kernel."""

from __future__ import annotations

import pytest

from mlagen.spec.arch import ARCHS, Arch
from mlagen.spec.combine import combine_specs
from mlagen.spec.gqa.sm80 import gqa_sm80_specs
from mlagen.spec.mla.sm80 import mla_sm80_specs


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_decode_output_has_one_combine_kernel(arch: Arch) -> None:
    """Each output dtype and width has one combine kernel."""
    needed = {(spec.out_dtype, spec.head_dim_vo) for spec in mla_sm80_specs(arch)}
    needed |= {(spec.variant.out_dtype, spec.variant.head_dim) for spec in gqa_sm80_specs(arch)}

    listed = [(spec.dtype, spec.head_dim_vo) for spec in combine_specs(arch)]

    assert len(listed) == len(set(listed))
    assert set(listed) == needed


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_ctas_cover_a_row(arch: Arch) -> None:
    """A slice is at most 128 output elements and needs no dynamic shared memory."""
    for spec in combine_specs(arch):
        assert (spec.slices - 1) * 128 < spec.head_dim_vo <= spec.slices * 128
        assert (spec.threads, spec.shared_bytes) == (128, 0)
