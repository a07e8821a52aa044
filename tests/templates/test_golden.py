"""Rendered kernels kept in git, so that a change of templates is read as what it generates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlagen.codegen.render import render
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from tests.kernels import (
    COMBINE,
    WIDE_DECODE,
    gqa_sm80,
    gqa_sm90,
    mla_sm90,
    mla_sm90_fp8,
    mla_sm90_fp8kv,
)

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    "spec",
    [
        WIDE_DECODE,
        mla_sm90(),
        mla_sm90_fp8(rows=64),
        mla_sm90_fp8kv(),
        gqa_sm80(kv_dtype=DType.E4M3),
        gqa_sm90(),
        COMBINE,
    ],
    ids=lambda spec: spec.family,
)
def test_a_rendered_kernel_is_as_it_was_read_last(spec: KernelSpec) -> None:
    """The text is the one in git; `MLAGEN_ACCEPT=1 pytest tests/templates` renews it."""
    text = render(spec).text
    golden = GOLDEN / f"{spec.family}.{spec.arch}.cu"
    if os.environ.get("MLAGEN_ACCEPT") == "1":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)

    assert golden.read_text() == text
