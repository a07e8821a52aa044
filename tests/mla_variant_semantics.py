"""Tests of the rarer MLA decode variants for every device; see tests/mla_semantics.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

import mlagen
from mlagen.families.mla.dispatch import run_mla
from tests.cases import MlaCase
from tests.mla_cases import KINDS, case_of_kind
from tests.mla_rows import POISON
from tests.mla_semantics import decode_with_lse


class MlaVariantSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize("length", [70, 5000], ids=["whole", "split"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
    def test_nan_in_a_token_masked_by_bias_reaches_nothing(
        self, dtype: torch.dtype, length: int
    ) -> None:
        """A bias of minus infinity masks a token for all heads or for some."""
        case = MlaCase(name="", seq_lens=(length,), heads=16, q_len=2, dtype=dtype)
        problem = replace(case, bias="for each head").build(self.device)
        bias = torch.zeros(2, 16, length, device=self.device)
        bias[:, :, 7] = -math.inf
        bias[:, 3:, 40] = -math.inf
        bias[0, 3:, 41] = -math.inf
        expected, _ = run_mla(problem.inputs(bias=bias), enable_pdl=True)
        stored = problem.kv_cache.view(torch.uint8)
        for position in (7, 40, 41):
            stored[int(problem.block_tables[0, position // 64]), position % 64] = POISON

        out, _ = run_mla(problem.inputs(bias=bias), enable_pdl=True)

        assert out[0, :, :3].isnan().all()
        assert torch.equal(out[0, 0, 3:], expected[0, 0, 3:])
        assert out[0, 1, 3:].isnan().all()  # the second query token attends to position 41

    def test_topk_lengths_are_clamped(self) -> None:
        """Lengths beyond topk mean all indices, and negative lengths mean none."""
        case = MlaCase(name="", seq_lens=(300, 300), top_k=70, with_top_k_lens=True)
        problem = case.build(self.device)
        full = replace(case, with_top_k_lens=False).build(self.device)
        lens = torch.tensor([1000, -3], dtype=torch.int32, device=self.device)

        out, lse = decode_with_lse(
            problem, block_tables=full.block_tables, sparse_mla_top_k_lens=lens
        )

        expected, expected_lse = decode_with_lse(full)
        assert torch.equal(out[0], expected[0])
        assert torch.equal(lse[0], expected_lse[0])
        assert (out[1] == 0).all()
        assert (lse[1] == -math.inf).all()

    def test_repeated_topk_indices_count_repeatedly(self) -> None:
        """With a sink in the denominator, a repeated token has twice the weight."""
        case = MlaCase(name="", seq_lens=(4,), top_k=4, heads=8, with_sinks=True)
        problem = case.build(self.device)
        sinks = torch.zeros(8, device=self.device)
        entry = int(problem.block_tables.flatten().clamp(min=-1).amax())
        lists = problem.block_tables.new_tensor([[[entry, -1, entry, entry]]])

        _, lse = decode_with_lse(problem, block_tables=lists, sinks=sinks, bmm1_scale=0.0)

        assert torch.allclose(lse, torch.full_like(lse, 2.0), atol=2**-10)

    @pytest.mark.parametrize("scale", [0.5, 2.0])
    def test_the_xqa_signature(self, scale: float) -> None:
        """Only the first scale multiplies the scores, and the output has four dimensions."""
        case = MlaCase(name="", seq_lens=(70, 3, 0), heads=20, output_scale=scale, with_sinks=True)
        problem = case.build(self.device)
        arguments = problem.arguments()
        given = torch.full((3, 20, 512), math.nan, dtype=torch.bfloat16, device=self.device)

        made = mlagen.mla.xqa_batch_decode_with_kv_cache_mla(**arguments)
        written = mlagen.mla.xqa_batch_decode_with_kv_cache_mla(**arguments, out=given)

        assert tuple(made.shape) == (3, 1, 20, 512)
        assert written is given
        problem.check(made)
        problem.check(given)

    def test_fp8_per_token_scales_are_optional(self) -> None:
        """Omitted scales of the query or of the cache count as 1."""
        case = case_of_kind(KINDS["fp8_per_token"], name="", seq_lens=(70, 3), score_scale=1e-4)
        problem = case.build(self.device)
        ones = torch.ones(2, device=self.device)
        all_ones = torch.ones_like(problem.extra_args["kv_scales"])

        without = run_mla(problem.inputs(query_scales=None, kv_scales=None), enable_pdl=True)[0]

        expected = run_mla(problem.inputs(query_scales=ones, kv_scales=all_ones), enable_pdl=True)
        assert without.isfinite().all()
        assert torch.equal(without, expected[0])

    @pytest.mark.parametrize("kind", ["e4m3", "fp8_per_token"])
    def test_an_fp8_query_has_bf16_output(self, kind: str) -> None:
        """The output of an FP8 query is bf16, allocated or provided."""
        problem = case_of_kind(KINDS[kind], name="", seq_lens=(70, 3)).build(self.device)
        given = torch.full((2, 16, 512), math.nan, dtype=torch.bfloat16, device=self.device)

        made, _ = run_mla(problem.inputs(), enable_pdl=True)
        run_mla(problem.inputs(out=given), enable_pdl=True)

        assert made.dtype is torch.bfloat16
        problem.check(given)
        assert torch.equal(made[:, 0], given)

    def test_lengths_beyond_flat_tables_are_clamped(self) -> None:
        """A length beyond the sequence's page ids is clamped to their capacity."""
        case = MlaCase(name="", seq_lens=(128, 64), flat_tables=True)
        problem = case.build(self.device)
        too_long = torch.tensor([1000, 640], dtype=torch.int32, device=self.device)

        out, _ = run_mla(problem.inputs(seq_lens=too_long), enable_pdl=True)

        problem.check(out)
