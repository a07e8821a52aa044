"""Parameters of the kernels over two pools, and the division by the rows of a page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import mlagen
from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.families.mla.two_pools import divider_of
from tests.families.entry_points import ROWS, make_entry_point
from tests.fixture_types import Patch
from tests.problems.dsv4 import DSV4, Dsv4Case
from tests.problems.dsv4_rows import Pages

_NONE = {
    **dict.fromkeys(("extra_cache", "extra_indices", "extra_topk_length", "extra_topk"), 0),
    **dict.fromkeys(("extra_num_pages", "extra_page_size", "extra_page_stride"), 0),
    **dict.fromkeys(("extra_token_stride", "extra_indices_stride"), 0),
    "extra_rows_per_page": 1,
    "extra_rows_per_page_mul": 1 << 31,
    "extra_rows_per_page_shift": -1,
}


def test_division_is_exact() -> None:
    """For every divisor the quotients at its multiples, and at the ends, are right."""
    ends = [2**k + more for k in range(12, 31) for more in (-1, 0, 1)]
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(1, 2**31 - 1, (500,), generator=generator).tolist()
    for divisor in (*range(1, 1200), *ends, *some, 2**31 - 1):
        mul, shift = divider_of(divisor)
        assert 2**31 <= mul < 2**32
        assert -1 <= shift < 31
        last = (2**31 - 1) // divisor
        random = torch.randint(0, last + 1, (20,), generator=generator).tolist()
        for quotient in {0, 1, 2, last - 1, last, *random}:
            for g in (quotient * divisor - 1, quotient * divisor, quotient * divisor + 1):
                if 0 <= g < 2**31:
                    assert (g * mul) >> (32 + shift) == g // divisor


def _values(case: Dsv4Case, monkeypatch: Patch, **changes: Any) -> dict[str, Any]:
    row = replace(ROWS["dsv4"], build=dict)
    entry_point = make_entry_point(monkeypatch, row)
    problem = case.build("cpu")
    arguments = DSV4.arguments(problem) | {"workspace_buffer": torch.zeros(1 << 20)} | changes
    entry_point.call(arguments)
    addresses = {
        each.data_ptr(): name for name, each in arguments.items() if isinstance(each, torch.Tensor)
    }
    values = entry_point.launches[0].values
    return {name: addresses.get(value, value) for name, value in values.items()}


def test_parameters_of_pages_with_scale_rows(monkeypatch: Patch) -> None:
    """Strides are those of data rows, and a page has as many rows as tokens."""
    case = Dsv4Case(
        seq_lens=(70, 3),
        extra_lens=(9, 100),
        extra_top_k=200,
        extra=Pages(page_size=61, count=7),
        list_stride=256,
    )
    expected = {
        "cache": "swa_kv_cache",
        "block_tables": "sparse_indices",
        "topk_length": "swa_topk_lens",
        "extra_cache": "compressed_kv_cache",
        "extra_indices": "extra_sparse_indices",
        "extra_topk_length": "extra_sparse_topk_lens",
        "topk": 128,
        "extra_topk": 200,
        "num_pages": 5,
        "extra_num_pages": 7,
        "page_size": 64,
        "extra_page_size": 61,
        "page_stride": 37440,
        "extra_page_stride": 35712,
        "token_stride": 576,
        "extra_token_stride": 576,
        "rows_per_page": 64,
        "extra_rows_per_page": 61,
        "block_tables_stride": 256,
        "extra_indices_stride": 256,
        "seq_lens": 0,
        "query": "query",
    }
    expected |= dict(zip(("rows_per_page_mul", "rows_per_page_shift"), divider_of(64), strict=True))

    values = _values(case, monkeypatch)

    assert values.items() >= expected.items()
    mul, shift = (values[f"extra_rows_per_page_{name}"] for name in ("mul", "shift"))
    assert [(g * mul) >> (32 + shift) for g in (60, 61, 121, 122)] == [0, 1, 1, 2]


def test_parameters_of_inline_rows(monkeypatch: Patch) -> None:
    """The padding of a page counts as rows; the query has tokens of several requests."""
    case = Dsv4Case(
        kv_cache_format="fp8_dsv41_inline_fp4_ca",
        seq_lens=(70, 3),
        extra_lens=(9, 100),
        q_len=2,
        swa=Pages(page_size=32, pitch=544, spare_rows=3),
        extra=Pages(page_size=16, pitch=288, spare_rows=5),
    )
    expected = {
        "page_size": 32,
        "rows_per_page": 35,
        "page_stride": 35 * 544,
        "token_stride": 544,
        "extra_page_size": 16,
        "extra_rows_per_page": 21,
        "extra_page_stride": 21 * 288,
        "extra_token_stride": 288,
        "q_len": 2,
        "num_seqs": 1,
        "total_rows": 32,
    }

    assert _values(case, monkeypatch).items() >= expected.items()


def test_parameters_without_a_second_pool(monkeypatch: Patch) -> None:
    """They are null and 0, also where a pool is given that no list names."""
    case = Dsv4Case(seq_lens=(70, 3))
    pool = torch.zeros(3, 64, 584, dtype=torch.uint8)

    for given in ({}, {"compressed_kv_cache": pool}):
        assert _values(case, monkeypatch, **given).items() >= _NONE.items()


@pytest.mark.usefixtures("h200")
class TestWorkspace:
    """Sizes of ``mlagen.workspace_bytes`` for calls over two pools."""

    def test_the_size_suffices(self) -> None:
        """For every format; the dims and the page size do not matter."""
        sizes: dict[str, Any] = {"batch": 5, "q_len": 2, "heads": 64, "max_seq_len": 0}
        lists: dict[str, Any] = {"sparse_mla_top_k": 128 + 8192}
        whole = mlagen.max_workspace_bytes()
        for word in ("fp8", "fp8_dsv41", "fp8_dsv41_fp4_ca"):
            needed = mlagen.workspace_bytes(kv_cache_format=word, **sizes, **lists)
            assert 0 < needed <= whole
            others: dict[str, Any] = {"page_size": 7, "kv_lora_rank": 256}
            assert needed == mlagen.workspace_bytes(
                kv_cache_format=word, **sizes, **lists, **others
            )

    def test_what_is_rejected(self) -> None:
        """No width of the lists, and formats that no kernel reads."""
        sizes: dict[str, Any] = {"batch": 5, "q_len": 2, "heads": 64, "max_seq_len": 0}
        with pytest.raises(ArgumentError, match="sparse_mla_top_k: expected 1 or more with kv_ca"):
            mlagen.workspace_bytes(kv_cache_format="fp8", **sizes)
        with pytest.raises(ArgumentError, match="kv_cache_format: expected one of fp8, fp8_dsv41"):
            mlagen.workspace_bytes(kv_cache_format="fp4", sparse_mla_top_k=1, **sizes)
        with pytest.raises(UnsupportedError, match="kv_cache_format: not implemented"):
            mlagen.workspace_bytes(kv_cache_format="nvfp4", sparse_mla_top_k=1, **sizes)
