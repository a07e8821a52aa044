"""Tests of TMA descriptor encoding."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mlagen.errors import DriverError
from mlagen.runtime.tensor_map import TiledTensor, encode
from mlagen.spec.dtype import DType
from tests.fixture_types import Patch

driver = pytest.importorskip("cuda.bindings.driver")

TENSOR = TiledTensor(
    dtype=DType.FP16, sizes=(64, 48, 8, 1000), strides=(1152, 128, 65536), box=(64, 16, 1, 1)
)
_KINDS = driver.CUtensorMapDataType
_SWIZZLES = driver.CUtensorMapSwizzle


@pytest.mark.parametrize(
    ("has_words", "kind", "swizzle"),
    [
        (False, _KINDS.CU_TENSOR_MAP_DATA_TYPE_FLOAT16, _SWIZZLES.CU_TENSOR_MAP_SWIZZLE_128B),
        (True, _KINDS.CU_TENSOR_MAP_DATA_TYPE_UINT32, _SWIZZLES.CU_TENSOR_MAP_SWIZZLE_NONE),
    ],
)
def test_every_property_reaches_the_driver(
    has_words: bool, kind: object, swizzle: object, monkeypatch: Patch
) -> None:
    """Type, rank, address, sizes, strides and box are passed; element strides are 1."""
    passed: list[Any] = []
    made = ctypes.create_string_buffer(bytes(range(128)), 128)

    def encode_tiled(*arguments: Any) -> tuple[Any, Any]:
        passed.extend(arguments)
        pointer = ctypes.addressof(made)
        return driver.CUresult.CUDA_SUCCESS, SimpleNamespace(getPtr=lambda: pointer)

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode_tiled)

    encoded = encode(replace(TENSOR, has_words=has_words), 0x7F00)

    assert encoded == bytes(range(128))
    passed_kind, rank, address, *lists = passed
    assert (passed_kind, rank, address) == (kind, 4, 0x7F00)
    assert [[int(number) for number in those] for those in lists[:4]] == [
        [64, 48, 8, 1000],
        [1152, 128, 65536],
        [64, 16, 1, 1],
        [1, 1, 1, 1],
    ]
    assert lists[4:] == [
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ]


def test_a_rejected_layout_is_an_error(monkeypatch: Patch) -> None:
    """The message names the driver call."""
    rejected = (driver.CUresult.CUDA_ERROR_INVALID_VALUE, None)
    words = (driver.CUresult.CUDA_SUCCESS, b"invalid argument")
    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", lambda *_: rejected)
    monkeypatch.setattr(driver, "cuGetErrorString", lambda _: words)
    with pytest.raises(DriverError, match=r"^cuTensorMapEncodeTiled: invalid argument"):
        encode(TENSOR, 0x7F00)
