"""Decode context parallel: what one rank computes, and that the ranks merge to the whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mlagen.cascade import merge_states
from tests.problems.entry_points import decode_with_lse
from tests.problems.mla import MlaCase, MlaProblem, mla_case
from tests.problems.reference import (
    UNIT_ROUNDOFF,
    assert_close,
    lse_tolerance,
    output_tolerance,
)

WORLDS = (1, 2, 3, 8)
KINDS = ("bf16", "fp16", "e4m3", "bf16 over e4m3", "bf16 over fp8_ds_mla")
# Every length modulo 8, sequences shorter than their query tokens, and an empty one.
RAGGED: dict[str, Any] = {
    "seq_lens": (100, 3, 0, 1, 70, 17, 30, 63, 64),
    "q_lens": (3, 5, 1, 2, 1, 0, 2, 1, 4),
    "heads": 3,
}


def merged_ranks(
    whole: MlaProblem, world: int, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the ranks of a problem of all tokens compute, merged."""
    outs, lses = [], []
    for rank in range(world):
        case = replace(whole.case, cp_world=world, cp_rank=rank)
        own = dict(changes)
        if rank and whole.sinks is not None:  # a sink counts once
            own["sinks"] = None
        out, lse = decode_with_lse(case.build(str(whole.device)), **own)
        outs.append(out.view(-1, case.heads, out.shape[-1]))
        lses.append(lse)
    return merge_states(torch.stack(outs, dim=1), torch.stack(lses, dim=1))


def check_whole(problem: MlaProblem, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Fail unless merged results are those of all tokens, with one more rounding of each part."""
    expected = problem.expected()
    tolerance = output_tolerance(out.dtype, expected, problem.math_dtype)
    tolerance += UNIT_ROUNDOFF[out.dtype] * expected.magnitude
    assert_close(out.float(), expected.out, tolerance, "out")
    assert_close(lse, expected.lse.float(), lse_tolerance(problem.math_dtype, expected), "lse")


class TestDcp:
    """One rank and all ranks, on the device of the fixture."""

    @pytest.mark.parametrize("world", WORLDS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_rank_attends_to_its_own_tokens(self, kind: str, world: int, device: str) -> None:
        """Every rank, over ragged requests; what it may not read is NaN."""
        for rank in range(world):
            case = mla_case(kind, **RAGGED, with_sinks=True, cp_world=world, cp_rank=rank)
            problem = case.build(device)

            problem.check(*decode_with_lse(problem))

    @pytest.mark.parametrize("world", WORLDS)
    @pytest.mark.parametrize("page_size", [1, 16, 64])
    def test_the_ranks_merge_to_the_whole(self, page_size: int, world: int, device: str) -> None:
        """Merged with the LSE of each, they are one call over all tokens."""
        problem = MlaCase(**RAGGED, page_size=page_size).build(device)

        check_whole(problem, *merged_ranks(problem, world))

    @pytest.mark.parametrize("q_len", [1, 2, 5])
    def test_sinks_of_one_rank_count_once(self, q_len: int, device: str) -> None:
        """A row that sees no token of that rank has the LSE of its sink."""
        case = MlaCase(seq_lens=(40, 3, 0), q_len=q_len, heads=4, with_sinks=True)
        problem = case.build(device)

        check_whole(problem, *merged_ranks(problem, 4))

    @pytest.mark.parametrize("q_len", [1, 3])
    @pytest.mark.parametrize("facts", [{"tokens_ahead": 5}, {"tokens_missing": 2}], ids=str)
    def test_the_shorter_of_both_lengths_holds(
        self, facts: dict[str, Any], q_len: int, device: str
    ) -> None:
        """That of the rank's cache, and that of all ranks under the causal mask."""
        for rank in range(3):
            case = MlaCase(
                seq_lens=(100, 3, 7), q_len=q_len, heads=4, cp_world=3, cp_rank=rank, **facts
            )
            problem = case.build(device)

            problem.check(*decode_with_lse(problem))

    def test_tokens_past_the_causal_length_may_be_nan(self, device: str) -> None:
        """A rank's tokens that a query token does not attend to have no effect on it."""
        case = MlaCase(
            seq_lens=(100,), q_len=4, heads=4, cp_world=2, cp_rank=1, tokens_ahead=3, page_size=16
        )
        clean, poisoned = case.build(device), case.build(device)
        masked = [at for at in range(case.local_lens[0]) if not poisoned.sees(0, 3, at)]
        for position in masked:
            poisoned.poison(0, position)

        out, lse = decode_with_lse(poisoned)

        assert len(masked) == 2
        assert torch.equal(out, decode_with_lse(clean)[0])
        assert torch.equal(lse, decode_with_lse(clean)[1])

    @pytest.mark.parametrize("length", [-(2**31), -1, 0, 2**31 - 1])
    def test_any_global_length_is_clamped(self, length: int, device: str) -> None:
        """Lengths of no token mask all, and others at most what the rank has."""
        problem = MlaCase(seq_lens=(40,), heads=4, cp_world=2, cp_rank=0).build(device)
        lengths = torch.tensor([length], dtype=torch.int32, device=device)

        out, lse = decode_with_lse(problem, causal_seqlens_kv_global=lengths)

        if length > 0:
            problem.check(out, lse)
        else:
            assert not out.any()
            assert (lse == -math.inf).all()

    @pytest.mark.parametrize("kind", ["bf16", "bf16 over fp8_ds_mla"])
    @pytest.mark.parametrize("with_lens", [False, True], ids=["all", "lengths"])
    def test_sparse_lists_have_tokens_of_the_rank(
        self, with_lens: bool, kind: str, device: str
    ) -> None:
        """All of their indices count, up to a given length; the ranks merge to the whole."""
        case = mla_case(
            kind, seq_lens=(90, 300, 9), q_lens=(2, 1, 3), top_k=70, heads=4, with_top_k_lens=True
        )
        problem = case.build(device)
        assert problem.top_k_lens is not None
        column = torch.arange(70, device=device)
        is_listed = column < problem.top_k_lens[:, None]
        outs, lses = [], []
        for rank in range(3):
            is_own = is_listed & (problem.block_tables % 3 == rank)
            out, lse = decode_with_lse(
                problem,
                block_tables=torch.where(is_own, problem.block_tables, -1),
                sparse_mla_top_k_lens=problem.top_k_lens if with_lens else None,
                seq_lens=torch.zeros(3, dtype=torch.int32, device=device),
                enable_dcp=True,
                cp_world=3,
                cp_rank=rank,
                causal_seqlens_kv_global=problem.seq_lens,
                return_lse_base="base2",
            )
            outs.append(out)
            lses.append(lse)

        check_whole(problem, *merge_states(torch.stack(outs, dim=1), torch.stack(lses, dim=1)))

    @pytest.mark.parametrize("base", [None, "base2", "basee"])
    def test_the_base_of_the_lse_is_natural_by_default(self, base: str, device: str) -> None:
        """As in FlashInfer; a given base holds."""
        problem = MlaCase(seq_lens=(40, 3), heads=4, cp_world=2, cp_rank=1).build(device)

        out, lse = decode_with_lse(problem, return_lse_base=base)

        problem.check(out, lse, natural=base != "base2")


def test_numpy_scalars_are_numbers() -> None:
    """As elsewhere: any integer type is a number of ranks."""
    np = pytest.importorskip("numpy")
    problem = MlaCase(seq_lens=(70, 3), cp_world=2, cp_rank=1).build("cpu")

    problem.check(*decode_with_lse(problem, cp_world=np.int64(2), cp_rank=np.int32(1)))
