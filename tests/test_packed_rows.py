"""MLA decode over fp8_ds_mla rows, with a rope part and without, for every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.problems.entry_points import decode, decode_with_lse
from tests.problems.extremes import listed, widened, with_extreme_numbers
from tests.problems.mla import mla_case
from tests.problems.problem import E4M3

KINDS = ("bf16 over fp8_ds_mla", "fp16 over fp8_ds_mla", "e4m3 over fp8_ds_mla")
kinds = pytest.mark.parametrize("kind", KINDS)
ropes = pytest.mark.parametrize("rope", [64, 0])
forms = pytest.mark.parametrize(
    "form", [lambda given: given, lambda given: listed(given, 320)], ids=["pages", "lists"]
)

# What an indexer lists that adds the newest, incomplete block of 4 tokens to its top 2048.
INDEXER_WIDTH = 2176
INDEXER_LENS = (1, 2047, 2048, 2049, 2051)


class TestPackedRows:
    """Results over rows of each width, on the device of the fixture."""

    @pytest.mark.parametrize("width", [528, 544, 656])
    @pytest.mark.parametrize("heads", [8, 64])
    @forms
    @kinds
    def test_bytes_after_a_row_without_rope_are_not_read(
        self, kind: str, form: Any, heads: int, width: int, device: str
    ) -> None:
        """The rows may be those of a wider pool, whose other bytes are NaN."""
        facts: dict[str, Any] = {"qk_rope_head_dim": 0, "cache_layout": "strided"}
        problem = mla_case(kind, seq_lens=(300, 70, 1), heads=heads, **facts).build(device)

        problem.check(*decode_with_lse(form(widened(problem, width))))

    @forms
    @kinds
    def test_a_zero_rope_part_is_no_rope_part(self, kind: str, form: Any, device: str) -> None:
        """Rows of 656 bytes whose rope part is zero, under a padded query, give the same result."""
        facts: dict[str, Any] = {"qk_rope_head_dim": 0, "cache_layout": "strided"}
        problem = mla_case(kind, seq_lens=(300, 70), heads=24, **facts).build(device)
        wide = widened(problem, 656)
        wide.kv_cache[..., 528:] = 0
        query = torch.cat([problem.query.float(), torch.zeros(2, 1, 24, 64, device=device)], -1)
        padded: Any = {"query": query.to(problem.query.dtype), "qk_rope_head_dim": 64}

        problem.check(*decode_with_lse(form(wide), **padded))

    @pytest.mark.parametrize(
        ("heads", "with_lens"), [(8, False), (64, True)], ids=["8-derived", "64-given"]
    )
    @pytest.mark.parametrize("kind", ["bf16 over fp8_ds_mla", "e4m3 over fp8_ds_mla", "e4m3"])
    def test_lists_of_an_indexer_without_rope(
        self, kind: str, heads: int, with_lens: bool, device: str
    ) -> None:
        """Lists of at most 2051 indices, then -1, may be wider than any of them."""
        case = mla_case(kind, seq_lens=INDEXER_LENS, heads=heads, qk_rope_head_dim=0)
        problem = listed(case.build(device), INDEXER_WIDTH, with_lens=with_lens)

        problem.check(*decode_with_lse(problem))

    @pytest.mark.parametrize("heads", [16, 24, 64])
    @forms
    @ropes
    @kinds
    def test_codes_and_scales_may_be_any_numbers(
        self, kind: str, rope: int, form: Any, heads: int, device: str
    ) -> None:
        """Every finite e4m3 code in query and cache, and scales from FLT_MIN to 100."""
        case = mla_case(kind, seq_lens=(300, 70, 1), heads=heads, qk_rope_head_dim=rope)
        problem = form(with_extreme_numbers(case.build(device)))

        problem.check(*decode_with_lse(problem))

    @pytest.mark.parametrize("heads", [16, 24, 64])
    @ropes
    def test_a_bf16_query_of_the_same_numbers(self, rope: int, heads: int, device: str) -> None:
        """An e4m3 query and the bf16 query that equals it give the same result."""
        case = mla_case(KINDS[2], seq_lens=(300, 70), heads=heads, qk_rope_head_dim=rope)
        problem = case.build(device)
        assert problem.query.dtype is E4M3

        problem.check(*decode_with_lse(problem))
        problem.check(*decode_with_lse(problem, query=problem.query.bfloat16()))

    @pytest.mark.parametrize("heads", [16, 24, 64])
    @forms
    @pytest.mark.parametrize(("rope", "column"), [(64, 17), (64, 540), (0, 17)])
    @kinds
    def test_nan_in_the_query_reaches_its_row_alone(
        self, kind: str, rope: int, column: int, form: Any, heads: int, device: str
    ) -> None:
        """The output of its token and head is NaN, and every other bit is as without it."""
        case = mla_case(kind, seq_lens=(300, 70), heads=heads, qk_rope_head_dim=rope)
        problem = form(case.build(device))
        expected = decode(problem).clone()
        query = problem.query.float()
        query[0, 0, 3, column] = torch.nan

        out = decode(problem, query=query.to(problem.query.dtype))

        assert out[0, 0, 3].isnan().all()
        out[0, 0, 3] = expected[0, 0, 3]
        assert torch.equal(out, expected)
