"""Tests of GQA decode for every device."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import mlagen.decode
from tests.gqa_problems import E4M3, GqaCase, GqaProblem
from tests.sink_values import extreme_sinks

SHORT_AND_LONG = pytest.mark.parametrize("length", [70, 5000], ids=["whole", "split"])


def decode(problem: GqaProblem, **changes: Any) -> torch.Tensor:
    """Return the output for a problem, with some arguments replaced."""
    return mlagen.decode.xqa_batch_decode_with_kv_cache(**problem.arguments(**changes))


class GqaSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @SHORT_AND_LONG
    @pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
    def test_scales_may_be_tensors(self, length: int, kv: str) -> None:
        """A scale in an fp32 tensor of zero or one dimension equals the float."""
        case = GqaCase(
            name="", seq_lens=(length, 3), kv=kv, score_scale=0.05, output_scale=1.5, o_scale=2.0
        )
        problem = case.build(self.device)

        out = decode(
            problem,
            bmm1_scale=torch.tensor(0.05, device=self.device),
            bmm2_scale=torch.tensor([1.5], device=self.device),
        )

        problem.check(out)

    def test_scales_may_be_ints(self) -> None:
        """A scale of 1 is 1.0."""
        problem = GqaCase(name="", seq_lens=(70, 3), score_scale=1.0).build(self.device)

        out = decode(problem, bmm1_scale=1, bmm2_scale=1, o_scale=1)

        problem.check(out)

    def test_output_shapes(self) -> None:
        """The allocated output has four dimensions for several query tokens, else three."""
        single = GqaCase(name="", seq_lens=(70, 3)).build(self.device)
        several = GqaCase(name="", seq_lens=(70, 3), q_len=2).build(self.device)
        ragged = GqaCase(name="", seq_lens=(70, 3), q_lens=(1, 3)).build(self.device)

        shapes = [tuple(decode(problem).shape) for problem in (single, several, ragged)]

        assert shapes == [(2, 8, 128), (2, 2, 8, 128), (4, 8, 128)]

    @SHORT_AND_LONG
    @pytest.mark.parametrize("shape", [(4, 8, 128), (2, 2, 8, 128)], ids=["flat", "by sequence"])
    def test_caller_provided_outputs(self, shape: tuple[int, ...], length: int) -> None:
        """`out` is written in place and returned, in either of its shapes."""
        problem = GqaCase(name="", seq_lens=(length, 3), q_len=2).build(self.device)
        out = torch.full(shape, math.nan, dtype=torch.bfloat16, device=self.device)

        result = decode(problem, out=out)

        assert result is out
        problem.check(out)

    def test_an_e4m3_output_saturates(self) -> None:
        """Values beyond e4m3 become 448, not NaN."""
        case = GqaCase(name="", seq_lens=(70, 3), kv="e4m3", out_dtype=E4M3, output_scale=1e6)
        problem = case.build(self.device)

        out = decode(problem).float()

        assert out.abs().max() == 448
        assert not out.isnan().any()

    def test_invalid_page_ids_do_not_fault(self) -> None:
        """An invalid page id affects only its own sequence."""
        problem = GqaCase(name="", seq_lens=(200, 200, 5000)).build(self.device)
        tables = problem.block_tables.clone()
        tables[0, :3] = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32)

        out = decode(problem, block_tables=tables)

        expected = decode(problem)
        assert torch.equal(out[1:], expected[1:])

    def test_lengths_beyond_the_table_are_clamped(self) -> None:
        """A length beyond the block table is clamped to its capacity."""
        problem = GqaCase(name="", seq_lens=(128, 64), spare_pages=0).build(self.device)
        too_long = torch.tensor([1000, 64], dtype=torch.int32, device=self.device)

        out = decode(problem, seq_lens=too_long)

        problem.check(out)

    def test_negative_lengths_are_empty(self) -> None:
        """A negative length counts as zero."""
        problem = GqaCase(name="", seq_lens=(0, 64)).build(self.device)
        negative = torch.tensor([-5, 64], dtype=torch.int32, device=self.device)

        out = decode(problem, seq_lens=negative)

        problem.check(out)

    def test_unsigned_lengths_and_tables(self) -> None:
        """Lengths, page ids and cu_seqlens_q may be uint32."""
        case = GqaCase(name="", seq_lens=(70, 3), q_lens=(2, 1), spare_pages=0)
        problem = case.build(self.device)
        assert problem.cum_seq_lens_q is not None

        out = decode(
            problem,
            seq_lens=problem.seq_lens.view(torch.uint32),
            block_tables=problem.block_tables.view(torch.uint32),
            q_cu_seq_lens=problem.cum_seq_lens_q.view(torch.uint32),
        )

        problem.check(out)

    @pytest.mark.parametrize("mask", [None, "random"], ids=["causal", "masked"])
    def test_offsets_outside_the_query_do_not_fault(self, mask: str | None) -> None:
        """A sequence whose query tokens are out of bounds affects only itself."""
        case = GqaCase(name="", seq_lens=(5, 100), q_lens=(2, 3), mask=mask)
        problem = case.build(self.device)
        ends = torch.tensor([0, 2, 900], dtype=torch.int32, device=self.device)

        out = decode(problem, q_cu_seq_lens=ends)

        assert torch.equal(out[:2], decode(problem)[:2])

    def test_sinks_may_be_shaped_by_kv_head(self) -> None:
        """`[kv_heads, group]` has the same memory as `[heads]`."""
        problem = GqaCase(name="", seq_lens=(70, 3), sink=3.0).build(self.device)
        assert problem.sinks is not None

        out = decode(problem, sinks=problem.sinks.view(2, 4))

        problem.check(out)

    @pytest.mark.parametrize("seq_lens", [(70, 1, 0), (5000, 0)], ids=["whole", "split"])
    def test_sinks_may_be_any_number(self, seq_lens: tuple[int, ...]) -> None:
        """For sinks of any size, infinite or NaN, the result matches float64."""
        problem = GqaCase(name="", seq_lens=seq_lens, group=8).build(self.device)
        problem = replace(problem, sinks=extreme_sinks(self.device))

        out = decode(problem)

        problem.check(out)

    def test_a_strided_query(self) -> None:
        """Heads of a query may be strided, as in a larger tensor."""
        problem = GqaCase(name="", seq_lens=(70, 3), q_len=2).build(self.device)
        wide = torch.full((4, 11, 160), math.nan, dtype=torch.bfloat16, device=self.device)
        wide[:, :8, :128] = problem.query

        out = decode(problem, query=wide[:, :8, :128])

        problem.check(out)

    def test_an_empty_batch(self) -> None:
        """No sequences give an empty result of the right shape."""
        problem = GqaCase(name="", seq_lens=(70,)).build(self.device)

        out = decode(
            problem,
            query=problem.query[:0],
            block_tables=problem.block_tables[:0],
            seq_lens=problem.seq_lens[:0],
        )

        assert tuple(out.shape) == (0, 8, 128)

    @pytest.mark.parametrize("max_seq_len", [0, 1, 100_000])
    def test_max_seq_len_changes_no_result(self, max_seq_len: int) -> None:
        """max_seq_len only decides the splits; a wrong one is no error."""
        problem = GqaCase(name="", seq_lens=(700, 3, 0), q_len=2).build(self.device)

        out = decode(problem, max_seq_len=max_seq_len)

        problem.check(out)

    @pytest.mark.parametrize(
        ("length", "batch", "positions"),
        [
            (200, 200, tuple(range(200))),
            (5000, 4, tuple(p for edge in range(64, 5000, 320) for p in (edge - 1, edge))),
        ],
        ids=["whole", "split"],
    )
    def test_no_token_is_skipped(self, length: int, batch: int, positions: tuple[int, ...]) -> None:
        """A query that matches one token gives its value, at any position."""
        case = GqaCase(name="", seq_lens=(length,) * batch, kv_heads=1, group=1, score_scale=1.0)
        problem = case.build(self.device)
        keys, values, tables = problem.store.key, problem.store.value, problem.block_tables.cpu()
        quiet = keys.clone()

        for first in range(0, len(positions), batch):
            chosen = positions[first : first + batch]
            keys.copy_(quiet)
            wanted = []
            for seq, position in enumerate(chosen):
                slot = int(tables[seq, position // 16]), position % 16
                keys[slot] = problem.query[seq]
                wanted.append(values[slot])

            out = decode(problem)[: len(chosen)]

            assert torch.allclose(out, torch.stack(wanted), rtol=2**-7, atol=2**-7), chosen

    @SHORT_AND_LONG
    def test_nan_in_a_query_stays_in_its_head(self, length: int) -> None:
        """A NaN in the query of one head makes that head NaN, and no other."""
        problem = GqaCase(name="", seq_lens=(length,)).build(self.device)
        problem.query[0, 3, 100] = math.nan

        out = decode(problem)

        assert out[0].isnan().all(dim=1).nonzero().tolist() == [[3]]
        assert out.isnan().sum() == 128
