"""Tests of MLA decode for every device, parametrized by tests/test_mla.py and tests/gpu."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

import mlagen
from mlagen.families.mla.dispatch import run_mla
from tests.cases import MlaCase, MlaProblem
from tests.mla_cases import KINDS, case_of_kind
from tests.mla_rows import POISON
from tests.sink_values import extreme_sinks


def decode(problem: MlaProblem, **changes: Any) -> torch.Tensor:
    """Return the output for a problem, with some arguments replaced."""
    out = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**problem.arguments(**changes))
    assert isinstance(out, torch.Tensor)
    return out


def decode_with_lse(problem: MlaProblem, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE for a problem, with some arguments replaced."""
    arguments = problem.arguments(return_lse=True, **changes)
    result = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert isinstance(result, tuple)
    return result


def compute(problem: MlaProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE for a problem, through an entry point that has its arguments."""
    if problem.case.has_trtllm_entry_point:
        return decode_with_lse(problem)
    out, lse = run_mla(problem.inputs(return_lse=True), enable_pdl=True)
    assert lse is not None
    return out, lse


class MlaSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize("seq_lens", [(70, 3), (5000,)], ids=["whole", "split"])
    def test_scales_may_be_tensors(self, seq_lens: tuple[int, ...]) -> None:
        """A scale in an fp32 tensor equals the float, also if KV is split."""
        case = MlaCase(name="", seq_lens=seq_lens, score_scale=0.05, output_scale=1.5)
        problem = case.build(self.device)

        out = decode(
            problem,
            bmm1_scale=torch.tensor(0.05, device=self.device),
            bmm2_scale=torch.tensor([1.5], device=self.device),
        )

        problem.check(out)

    @pytest.mark.parametrize("seq_lens", [(70, 3, 0), (5000,)], ids=["whole", "split"])
    def test_natural_lse_and_caller_provided_outputs(self, seq_lens: tuple[int, ...]) -> None:
        """`out` and `lse` are written in the caller's shapes, the LSE in the requested base."""
        case = MlaCase(name="", seq_lens=seq_lens, heads=20, with_sinks=True)
        problem = case.build(self.device)
        batch = len(seq_lens)
        out = torch.full((batch, 20, 512), math.nan, dtype=torch.bfloat16, device=self.device)
        lse = torch.full((batch, 1, 20), math.nan, device=self.device)

        result = decode_with_lse(problem, out=out, lse=lse, return_lse_base="basee")

        assert result[0] is out
        assert result[1] is lse
        problem.check(out, lse, natural=True)

    def test_output_shapes(self) -> None:
        """The allocated output is shaped like the query, and the LSE is flat over tokens."""
        uniform = MlaCase(name="", seq_lens=(70, 3), q_len=2, heads=5).build(self.device)
        ragged = MlaCase(name="", seq_lens=(70, 3), q_lens=(1, 3), heads=5).build(self.device)

        results = [decode_with_lse(problem) for problem in (uniform, ragged)]

        shapes = [(tuple(out.shape), tuple(lse.shape)) for out, lse in results]
        assert shapes == [((2, 2, 5, 512), (4, 5)), ((4, 5, 512), (4, 5))]

    @pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
    def test_nan_in_a_masked_token_reaches_no_other_row(
        self, kind: tuple[torch.dtype, str, str]
    ) -> None:
        """NaN in the newest token reaches the last query token only."""
        case = case_of_kind(kind, name="", seq_lens=(100, 64, 33), q_len=4, heads=16)
        problem = case.build(self.device)
        stored = problem.kv_cache.view(torch.uint8)
        for seq, length in enumerate(case.seq_lens):
            page = int(problem.block_tables[seq, (length - 1) // 64])
            stored[page, (length - 1) % 64] = POISON

        out, _ = compute(problem)

        assert out[:, 3].isnan().all()
        expected, _ = compute(case.build(self.device))
        assert torch.equal(out[:, :3], expected[:, :3])

    def test_invalid_page_ids_do_not_fault(self) -> None:
        """An invalid page id affects only its own sequence."""
        problem = MlaCase(name="", seq_lens=(200, 200, 5000), heads=16).build(self.device)
        tables = problem.block_tables.clone()
        tables[0, :3] = torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32)

        out = decode(problem, block_tables=tables)

        expected = decode(problem)
        assert torch.equal(out[1:], expected[1:])

    def test_lengths_beyond_the_table_are_clamped(self) -> None:
        """A length beyond the block table is clamped to its capacity."""
        case = MlaCase(name="", seq_lens=(128, 64), spare_pages=0)
        problem = case.build(self.device)
        too_long = torch.tensor([1000, 64], dtype=torch.int32, device=self.device)

        out = decode(problem, seq_lens=too_long)

        problem.check(out)

    def test_negative_lengths_are_empty(self) -> None:
        """A negative length counts as zero."""
        problem = MlaCase(name="", seq_lens=(0, 64)).build(self.device)
        negative = torch.tensor([-5, 64], dtype=torch.int32, device=self.device)

        out, lse = decode_with_lse(problem, seq_lens=negative)

        problem.check(out, lse)

    def test_unsigned_lengths_and_tables(self) -> None:
        """Lengths and page ids may be uint32."""
        problem = MlaCase(name="", seq_lens=(70, 3), spare_pages=0).build(self.device)

        out = decode(
            problem,
            seq_lens=problem.seq_lens.view(torch.uint32),
            block_tables=problem.block_tables.view(torch.uint32),
        )

        problem.check(out)

    @pytest.mark.parametrize("longest", [None, 0, 1, 4, 1000])
    def test_max_q_len_is_only_a_hint(self, longest: int | None) -> None:
        """Omitted, too small or too large, max_q_len changes no result."""
        case = MlaCase(name="", seq_lens=(5, 100, 0), q_lens=(1, 4, 2), heads=16)
        problem = case.build(self.device)

        out, lse = decode_with_lse(problem, max_q_len=longest)

        problem.check(out, lse)

    def test_query_tokens_past_the_last_sequence_are_ignored(self) -> None:
        """Query tokens past the last offset do not affect the sequences."""
        problem = MlaCase(name="", seq_lens=(5, 100), q_lens=(2, 3), heads=16).build(self.device)
        more = torch.cat([problem.query, problem.query])

        out = decode(problem, query=more)

        problem.check(out[:5])

    def test_offsets_outside_the_query_do_not_fault(self) -> None:
        """A sequence whose query tokens are out of bounds affects only itself."""
        problem = MlaCase(name="", seq_lens=(5, 100), q_lens=(2, 3), heads=16).build(self.device)
        ends = torch.tensor([0, 2, 900], dtype=torch.int32, device=self.device)

        out = decode(problem, cum_seq_lens_q=ends)

        assert torch.equal(out[:2], decode(problem)[:2])

    def test_sinks_may_be_a_list_of_one(self) -> None:
        """FlashInfer's list of one sinks tensor is accepted."""
        problem = MlaCase(name="", seq_lens=(70, 3), with_sinks=True).build(self.device)

        out = decode(problem, sinks=[problem.sinks])

        problem.check(out)

    @pytest.mark.parametrize("base", ["base2", "basee"])
    @pytest.mark.parametrize("seq_lens", [(70, 1, 0), (5000, 0)], ids=["whole", "split"])
    def test_sinks_may_be_any_number(self, seq_lens: tuple[int, ...], base: str) -> None:
        """For sinks of any size, infinite or NaN, the result matches float64."""
        problem = MlaCase(name="", seq_lens=seq_lens).build(self.device)
        problem = replace(problem, sinks=extreme_sinks(self.device))

        out, lse = decode_with_lse(problem, return_lse_base=base)

        problem.check(out, lse, natural=base == "basee")

    @pytest.mark.parametrize("with_sinks", [True, False], ids=["sinks", "no sinks"])
    @pytest.mark.parametrize("base", ["base2", "basee"])
    def test_a_fully_masked_row_has_the_lse_of_its_sink(self, base: str, with_sinks: bool) -> None:
        """The output is zeros, and the LSE the sink in the requested base, or minus infinity."""
        case = MlaCase(name="", seq_lens=(0, 2, 0), q_len=3, heads=8, with_sinks=with_sinks)
        problem = case.build(self.device)

        out, lse = decode_with_lse(problem, return_lse_base=base)

        unit = math.log(2) if base == "base2" else 1.0
        wanted = torch.full((8,), -math.inf, device=self.device)
        if problem.sinks is not None:
            wanted = problem.sinks / unit
        for token in (0, 1, 2, 3, 6, 7, 8):  # and the first new token of the second sequence
            assert torch.allclose(lse[token], wanted, rtol=1e-6)
            assert not out.view(9, 8, 512)[token].any()

    def test_an_lse_tensor_without_return_lse_is_not_written(self) -> None:
        """`lse` without `return_lse` is neither written nor returned."""
        problem = MlaCase(name="", seq_lens=(70, 3)).build(self.device)
        lse = torch.full((2, 16), 7.0, device=self.device)

        out = decode(problem, lse=lse)

        problem.check(out)
        assert (lse == 7.0).all()

    def test_a_strided_query(self) -> None:
        """Heads of a query may be strided, as in a larger tensor."""
        problem = MlaCase(name="", seq_lens=(70, 3), q_len=2, heads=6).build(self.device)
        wide = torch.full((2, 2, 9, 640), math.nan, dtype=torch.bfloat16, device=self.device)
        wide[:, :, :6, :576] = problem.query

        out = decode(problem, query=wide[:, :, :6, :576])

        problem.check(out)

    def test_an_empty_batch(self) -> None:
        """No sequences give empty results of the right shapes."""
        problem = MlaCase(name="", seq_lens=(70,), heads=16).build(self.device)

        out, lse = decode_with_lse(
            problem,
            query=problem.query[:0],
            block_tables=problem.block_tables[:0],
            seq_lens=problem.seq_lens[:0],
        )

        assert tuple(out.shape) == (0, 1, 16, 512)
        assert tuple(lse.shape) == (0, 16)

    @pytest.mark.parametrize(
        ("length", "batch", "positions"),
        [
            (200, 200, tuple(range(200))),
            (5000, 4, tuple(p for edge in range(64, 5000, 64) for p in (edge - 1, edge))),
        ],
        ids=["whole", "split"],
    )
    def test_no_token_is_skipped(self, length: int, batch: int, positions: tuple[int, ...]) -> None:
        """A query that matches one token gives its value, at any position."""
        problem = MlaCase(name="", seq_lens=(length,) * batch, heads=1).build(self.device)
        cache, tables = problem.kv_cache, problem.block_tables.cpu()
        quiet = cache.clone()
        loud = problem.query[:, 0, 0]

        for first in range(0, len(positions), batch):
            chosen = positions[first : first + batch]
            cache.copy_(quiet)
            for seq, position in enumerate(chosen):
                cache[int(tables[seq, position // 64]), position % 64] = loud[seq]

            out = decode(problem)[: len(chosen), 0, 0]

            assert torch.allclose(out, loud[: len(chosen), :512], rtol=2**-7, atol=2**-7), chosen

    @pytest.mark.parametrize("length", [70, 5000], ids=["whole", "split"])
    def test_nan_in_a_query_stays_in_its_head(self, length: int) -> None:
        """A NaN in the query of one head makes that head NaN, output and LSE, and no other."""
        problem = MlaCase(name="", seq_lens=(length,), heads=16).build(self.device)
        problem.query[0, 0, 3, 100] = math.nan

        out, lse = decode_with_lse(problem)

        assert out[0, 0].isnan().all(dim=1).nonzero().tolist() == [[3]]
        assert out.isnan().sum() == 512
        assert lse[0].isnan().nonzero().tolist() == [[3]]
