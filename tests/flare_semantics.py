"""Tests of flare_mla_decoding for every device; see tests/test_flare.py and tests/gpu."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from mlagen.mla.flare import PagedKVCache, flare_mla_decoding
from mlagen.mla.masks import CausalMask, MaterializedMask, NullMask, OrMask
from tests.cases import MlaCase
from tests.flare_masks import MASKS, SCALE
from tests.flare_problems import (
    FORMATS,
    LONG,
    ONE_EACH,
    PACKED,
    RAGGED,
    cached_lengths,
    check,
    decode,
    expected,
    pad,
    placed,
)
from tests.mla_rows import E4M3, POISON
from tests.reference import assert_close, output_tolerance


class FlareSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize("name", MASKS)
    @pytest.mark.parametrize("case", [RAGGED, LONG], ids=["short", "split"])
    def test_every_mask_over_ragged_sequences(self, case: MlaCase, name: str) -> None:
        """Each token attends to what its mask allows, and the output matches float64."""
        problem, rule = case.build(self.device), MASKS[name]

        out = decode(problem, rule)

        check(problem, rule, out)

    @pytest.mark.parametrize("name", MASKS)
    def test_every_mask_over_padded_sequences(self, name: str) -> None:
        """Padding changes nothing for the tokens before it, and its output is zeros."""
        problem, rule = RAGGED.build(self.device), MASKS[name]
        padded = pad(problem, q_len=6)

        out = decode(
            problem, rule, q=padded.query, valid_length=padded.valid, ragged=False, padded=padded
        )

        assert tuple(out.shape) == (6, 6, 6, 512)
        check(problem, rule, out[padded.is_token])
        assert (out[~padded.is_token] == 0).all()

    @pytest.mark.parametrize("name", MASKS)
    def test_every_mask_over_one_token_per_sequence(self, name: str) -> None:
        """Sequences of one token need no padding, and one without its token gives zeros."""
        problem, rule = ONE_EACH.build(self.device), MASKS[name]
        valid = torch.tensor([1, 1, 0, 1], dtype=torch.int32, device=self.device)
        cached = (problem.seq_lens - 1).clamp(min=0)

        out = decode(
            problem,
            rule,
            q=problem.query.unsqueeze(1),
            valid_length=valid,
            ragged=False,
            cache_lengths=cached,
        )

        assert tuple(out.shape) == (4, 1, 6, 512)
        wanted = expected(problem, rule)
        wanted.out[2] = 0
        tolerance = output_tolerance(out.dtype, wanted, problem.math_dtype)
        assert_close(out[:, 0], wanted.out, tolerance, "out")

    @pytest.mark.parametrize("name", ["causal", "window of 3", "either of two"])
    @pytest.mark.parametrize("row_format", FORMATS)
    def test_every_format(self, row_format: str, name: str) -> None:
        """Every KV format of flare decodes, with poison between the rows."""
        problem, rule = FORMATS[row_format].build(self.device), MASKS[name]
        padded = pad(problem, q_len=5)

        ragged = decode(problem, rule)
        out = decode(
            problem, rule, q=padded.query, valid_length=padded.valid, ragged=False, padded=padded
        )

        check(problem, rule, ragged)
        check(problem, rule, out[padded.is_token])
        assert (out[~padded.is_token] == 0).all()

    def test_query_scales_are_optional(self) -> None:
        """Without query scales each counts as 1."""
        problem, rule = PACKED.build(self.device), MASKS["all"]
        ones = torch.ones_like(problem.extra_args["query_scales"])

        out = decode(problem, rule, q_scale=None)

        assert torch.equal(out, decode(problem, rule, q_scale=ones))

    @pytest.mark.parametrize("form", ["padded", "ragged"])
    def test_a_caller_provided_output(self, form: str) -> None:
        """`output` is written in place and returned, including its padding."""
        problem, rule = RAGGED.build(self.device), MASKS["causal"]
        padded = pad(problem, q_len=5)
        query = padded.query if form == "padded" else problem.query
        given = torch.full_like(query[..., :512], math.nan)

        out = decode(
            problem,
            rule,
            q=query,
            valid_length=padded.valid if form == "padded" else problem.cum_seq_lens_q,
            ragged=form == "ragged",
            output=given.contiguous(),
        )

        assert out.isnan().sum() == 0
        check(problem, rule, out[padded.is_token] if form == "padded" else out)

    @pytest.mark.parametrize("axis", [1, 2])
    def test_a_cache_with_a_head_axis(self, axis: int) -> None:
        """The cache may have an axis for its one KV head, and the scales an axis per head."""
        problem, rule = PACKED.build(self.device), MASKS["window of 3"]

        out = decode(
            problem,
            rule,
            blocks=problem.kv_cache.unsqueeze(axis),
            scales=problem.extra_args["kv_scales"][..., None, None],
        )

        check(problem, rule, out)

    def test_unsigned_lengths_and_num_partitions(self) -> None:
        """Lengths and tables may be uint32, and num_partitions changes nothing."""
        problem, rule = RAGGED.build(self.device), MASKS["window of 3"]
        assert problem.cum_seq_lens_q is not None

        out = decode(
            problem,
            rule,
            valid_length=problem.cum_seq_lens_q.view(torch.uint32),
            block_table=problem.block_tables.clamp(min=0).view(torch.uint32),
            cache_lengths=cached_lengths(problem).view(torch.uint32),
            num_partitions=4,
        )

        check(problem, rule, out)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
    def test_nan_in_a_masked_token_reaches_nothing(self, dtype: torch.dtype) -> None:
        """A token before the window may hold NaN, in key and value."""
        case = replace(RAGGED, seq_lens=(100, 100), q_lens=(1, 4), dtype=dtype)
        problem, rule = case.build(self.device), MASKS["window of 3"]
        stored = problem.kv_cache.view(torch.uint8)
        for seq, newest in ((0, 97), (1, 94)):
            for position in range(newest):
                page = int(problem.block_tables[seq, position // 16])
                stored[page, position % 16] = POISON

        out = decode(problem, rule)

        check(problem, rule, out)

    def test_a_materialized_mask_may_have_an_offset(self) -> None:
        """With a start position a materialized mask applies to the rows from there on."""
        problem = RAGGED.build(self.device)
        numbers = torch.randn(6, 6, 4, 120, device=self.device)
        cached = cached_lengths(problem)
        mask = MaterializedMask(numbers, start_pos=cached)
        later = MaterializedMask(numbers[:, :, 1:], start_pos=1)

        out = decode(problem, replace(MASKS["all"], mask=lambda *_: mask))
        none = decode(problem, replace(MASKS["all"], mask=lambda *_: later))

        host = numbers.double().cpu()
        rows = zip(*placed(problem), strict=True)
        bias = [
            host[seq, :, index, :length]
            if index < 4
            else torch.full((6, length), -math.inf, dtype=torch.float64)
            for seq, index, length in rows
        ]
        wanted = expected(problem, MASKS["all"], bias)
        tolerance = output_tolerance(out.dtype, wanted, problem.math_dtype)
        assert_close(out, wanted.out, tolerance, "out")
        is_inside = torch.tensor(
            [1 <= int(cached[r]) + i < 4 for r, i, _ in zip(*placed(problem), strict=True)]
        )
        assert (none[~is_inside.to(self.device)] == 0).all()

    @pytest.mark.parametrize("largest", [3.4e38, -3.4e38])
    def test_a_bias_may_be_as_large_as_float32_allows(self, largest: float) -> None:
        """One token then has all the weight of a row, or none."""
        problem = RAGGED.build(self.device)
        numbers = torch.zeros(6, 6, 5, 120, device=self.device)
        numbers[..., 0] = largest
        mask = MaterializedMask(numbers, start_pos=cached_lengths(problem))

        out = decode(problem, replace(MASKS["all"], mask=lambda *_: mask))

        host = numbers[0, :, 0].double().cpu()
        bias = [host[:, :length] for length in placed(problem)[2]]
        wanted = expected(problem, MASKS["all"], bias)
        tolerance = output_tolerance(out.dtype, wanted, problem.math_dtype)
        assert_close(out, wanted.out, tolerance, "out")

    def test_a_masked_bias_may_be_nan(self) -> None:
        """A bias that another mask hides may be NaN."""
        problem = RAGGED.build(self.device)
        positions = torch.arange(100, device=self.device)
        numbers = torch.where(positions <= positions[:, None], 0.0, math.nan).expand(6, -1, -1)
        both = OrMask(MaterializedMask(numbers, start_pos=0), CausalMask())

        out = decode(problem, replace(MASKS["causal"], mask=lambda *_: both))

        check(problem, MASKS["causal"], out)

    def test_an_empty_batch(self) -> None:
        """An empty batch gives an empty output, whatever the mask."""
        problem = RAGGED.build(self.device)
        zero = torch.zeros(1, dtype=torch.int32, device=self.device)
        cache = PagedKVCache(problem.kv_cache, problem.block_tables[:0], zero[:0])
        dense = torch.zeros(0, 9, 1, 576, dtype=torch.bfloat16, device=self.device)
        query = problem.query[:0]

        for mask in (NullMask(), MASKS["window of 3"].mask(0, 6, self.device)):
            ragged = flare_mla_decoding(query, cache, mask, zero, SCALE, ragged=True)
            padded = flare_mla_decoding(query[:, None], cache, mask, zero[:0], SCALE)
            of_dense = flare_mla_decoding(query[:, None], dense, mask, None, SCALE)

            assert tuple(ragged.shape) == (0, 6, 512)
            assert tuple(padded.shape) == (0, 1, 6, 512)
            assert tuple(of_dense.shape) == (0, 1, 6, 512)
