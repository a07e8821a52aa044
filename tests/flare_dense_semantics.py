"""Tests of flare_mla_decoding over dense keys, for every device."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from mlagen.mla.flare import flare_mla_decoding
from mlagen.mla.masks import CausalMask
from tests.flare_masks import MASKS, SCALE
from tests.flare_problems import (
    check,
    flare_case,
    pad,
)
from tests.mla_rows import E4M3, POISON
from tests.reference import assert_close, attend, output_tolerance, stack


class FlareDenseSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize("name", MASKS)
    @pytest.mark.parametrize("q_len", [1, 3])
    def test_every_mask_over_dense_keys(self, q_len: int, name: str) -> None:
        """Dense keys belong to all sequences, the new tokens are the last of them."""
        rule, batch, num_keys, heads = MASKS[name], 6, 37, 4
        generator = torch.Generator().manual_seed(q_len)
        k = torch.randn(batch, num_keys, 1, 576, generator=generator).bfloat16()
        q = torch.randn(batch, q_len, heads, 576, generator=generator).bfloat16()

        out = flare_mla_decoding(
            q.to(self.device),
            k.to(self.device),
            rule.mask(batch, heads, self.device),
            None,
            SCALE,
        )

        first = num_keys - q_len
        parts = [
            attend(
                q[b, i],
                k[b, :, 0],
                k[b, :, 0, :512],
                score_scale=SCALE,
                bias=rule.bias(b, heads, first + i, num_keys),
            )
            for b in range(batch)
            for i in range(q_len)
        ]
        wanted = stack(parts)
        tolerance = output_tolerance(torch.bfloat16, wanted)
        assert_close(out.flatten(0, 1), wanted.out, tolerance, "out")

    def test_dense_keys_in_fp8_per_token(self) -> None:
        """Dense keys may be fp8_per_token with their scales, and strided."""
        case = flare_case(
            seq_lens=(33, 33), q_lens=(2, 2), page_size=33, kv_format="fp8_per_token", spare_pages=0
        )
        problem, rule = case.build(self.device), MASKS["causal"]
        pages = problem.block_tables[:, 0].long()
        k = problem.kv_cache.view(torch.uint8)[pages].unsqueeze(2)
        wide = torch.full((2, 40, 1, 640), POISON, dtype=torch.uint8, device=self.device)
        wide[:, :33] = k

        out = flare_mla_decoding(
            problem.query.view(2, 2, 6, 640),
            wide.view(E4M3)[:, :33],
            CausalMask(),
            None,
            SCALE,
            q_scale=problem.extra_args["query_scales"].view(2, 2),
            per_token_scale_rope_aware=True,
            kv_scales=problem.extra_args["kv_scales"][pages],
        )

        check(problem, rule, out.flatten(0, 1))

    def test_dense_keys_with_padding(self) -> None:
        """With lengths, the tokens before the padding are the last keys."""
        case = flare_case(seq_lens=(33, 33, 33), q_lens=(2, 0, 3), page_size=33, spare_pages=0)
        problem, rule = case.build(self.device), MASKS["window of 3"]
        k = problem.kv_cache[problem.block_tables[:, 0].long()].unsqueeze(2)
        padded = pad(problem, q_len=3)
        mask = rule.mask(3, 6, self.device)

        ragged = flare_mla_decoding(
            problem.query, k, mask, problem.cum_seq_lens_q, SCALE, ragged=True
        )
        out = flare_mla_decoding(padded.query, k, mask, padded.valid, SCALE)

        check(problem, rule, ragged)
        check(problem, rule, out[padded.is_token])
        assert (out[~padded.is_token] == 0).all()

    def test_empty_dense_keys(self) -> None:
        """Sequences without keys give zeros."""
        q = torch.randn(2, 3, 4, 576, device=self.device).bfloat16()
        k = torch.zeros(2, 0, 1, 576, device=self.device).bfloat16()

        for name in ("all", "causal", "window of 3"):
            out = flare_mla_decoding(q, k, MASKS[name].mask(2, 4, self.device), None, SCALE)

            assert tuple(out.shape) == (2, 3, 4, 512)
            assert (out == 0).all()
