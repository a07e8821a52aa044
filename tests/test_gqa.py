"""GQA decode, also as TensorRT-LLM calls it, and the functions of xqa: rules of their own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import mlagen.xqa
from mlagen.cascade import merge_state, merge_states
from mlagen.errors import ArgumentError
from mlagen.families.dispatch import GQA
from mlagen.families.gqa.args import GqaArgs
from tests.problems.batch_decode import run, wrapper_of
from tests.problems.entry_points import (
    ENTRY_POINTS,
    decode_gqa,
    decode_gqa_with_lse,
    trtllm_gqa_arguments,
    trtllm_gqa_with_lse,
    xqa_arguments,
    xqa_mla_arguments,
)
from tests.problems.gqa import GqaCase, GqaProblem
from tests.problems.mla import MlaCase
from tests.problems.problem import E4M3, ints
from tests.problems.reference import (
    UNIT_ROUNDOFF,
    assert_close,
    lse_tolerance,
    output_tolerance,
)

SMALL = GqaCase(seq_lens=(70, 3), sink=3.0)
LONG = GqaCase(seq_lens=(5000, 3))
XQA, XQA_MLA = ENTRY_POINTS["xqa"], ENTRY_POINTS["xqa_mla"]
TRTLLM = ENTRY_POINTS["trtllm_gqa"]


def trtllm(problem: GqaProblem, query: torch.Tensor, out_dtype: torch.dtype | None) -> Any:
    """Return the output of a query in a dtype."""
    return TRTLLM.call(problem, query=query, out=None, out_dtype=out_dtype)


def planned(problem: GqaProblem, query: torch.Tensor, out_dtype: torch.dtype | None) -> Any:
    """Return the same of batch decode."""
    wrapper = wrapper_of(problem, q_data_type=query.dtype, o_data_type=out_dtype)
    return run(wrapper, problem, q=query)


class TestGqa:
    """Rules of the GQA entry points and of ``xqa_mla``, on the device of the fixture."""

    def test_an_output_by_sequence(self, device: str) -> None:
        """The output of several query tokens may have an axis of sequences."""
        problem = GqaCase(seq_lens=(70, 3), q_len=2).build(device)
        out = problem.new_out().view(2, 2, 8, 128)

        assert decode_gqa(problem, out=out) is out

        problem.check(out)

    @pytest.mark.parametrize("q_lens", [None, (2, 3)], ids=["uniform", "ragged"])
    @pytest.mark.parametrize("entry", ["xqa_batch", "trtllm_gqa", "xqa"])
    @pytest.mark.parametrize("mask", [None, "random"])
    def test_no_query_tokens(
        self, mask: str | None, entry: str, q_lens: tuple[int, ...] | None, device: str
    ) -> None:
        """Neither requests nor rows of a mask, or ragged requests without tokens: empty outputs."""
        case = GqaCase(seq_lens=(70, 3), q_len=1 if q_lens else 2, q_lens=q_lens, mask=mask)
        arguments = ENTRY_POINTS[entry].arguments(case.build(device))
        tokens, requests = "query q output mask", "block_tables page_table seq_lens"
        for name in f"{tokens} {requests if q_lens is None else ''}".split():
            if arguments.get(name) is not None:
                arguments[name] = arguments[name][:0]
        if q_lens is not None:
            offsets = ENTRY_POINTS[entry].names["offsets"]
            arguments[offsets] = torch.zeros_like(arguments[offsets])

        out = ENTRY_POINTS[entry].function(**arguments)

        assert out is None or (out.numel(), out.shape[-1]) == (0, 128)

    def test_an_e4m3_output_saturates(self, device: str) -> None:
        """Values beyond e4m3 become 448, not NaN."""
        case = GqaCase(seq_lens=(70, 3), kv="e4m3", out_dtype=E4M3, output_scale=1e6)

        out = decode_gqa(case.build(device)).float()

        assert out.abs().max() == 448
        assert not out.isnan().any()

    def test_sinks_may_be_shaped_by_kv_head(self, device: str) -> None:
        """`[kv_heads, group]` has the same memory as `[heads]`."""
        problem = SMALL.build(device)
        assert problem.sinks is not None

        problem.check(decode_gqa(problem, sinks=problem.sinks.view(2, 4)))

    @pytest.mark.parametrize("lens", [(70, 3), (5000, 3)], ids=["whole", "split"])
    def test_an_lse_changes_no_bit_of_the_output(self, lens: tuple[int, ...], device: str) -> None:
        """The output is bitwise equal with and without an LSE."""
        problem = GqaCase(seq_lens=lens, sink=3.0).build(device)

        assert torch.equal(decode_gqa_with_lse(problem)[0], decode_gqa(problem))

    def test_an_lse_of_xqa_may_be_natural_and_flat(self, device: str) -> None:
        """`lse_base` and an `lse` of `[tokens, heads]`."""
        problem = GqaCase(seq_lens=(70, 3), q_len=2, sink=3.0).build(device)
        lse = torch.full((4, 8), math.nan, device=device)

        problem.check(XQA.run(problem, lse=lse, lse_base="basee"), lse, natural=True)

    @pytest.mark.parametrize("prefix", [0, 16, 48, 4096], ids=str)
    def test_a_shared_prefix_by_two_calls(self, prefix: int, device: str) -> None:
        """The merged states of prefix and rest are those of one call over all tokens."""
        lens = (prefix + 33, prefix + 2, prefix + 16)
        problem = GqaCase(seq_lens=lens, q_len=2, sink=3.0, kv_heads=1, head_dim=64).build(device)
        shared = prefix // problem.case.page_size
        for seq in range(1, len(lens)):  # their own pages of the prefix are not read any more
            problem.block_tables[seq, :shared] = problem.block_tables[0, :shared]
            for name in ("keys", "values"):
                own, first = (getattr(problem.contents[at], name) for at in (seq, 0))
                own[:prefix] = first[:prefix]
        rows = (6, problem.case.heads)
        one_sequence: dict[str, Any] = {"q_len_per_req": 6, "causal": False, "sinks": None}
        one_sequence["seq_lens"] = ints(prefix).to(device)
        tables = problem.block_tables[:1, : max(1, shared)]
        first = decode_gqa_with_lse(problem, block_tables=tables, **one_sequence)
        tables, lengths = problem.block_tables[:, shared:].contiguous(), problem.seq_lens - prefix
        rest = decode_gqa_with_lse(problem, block_tables=tables, seq_lens=lengths)

        shapes = ((*rows, 64), rows) * 2
        out, lse = merge_state(*map(torch.Tensor.view, (*first, *rest), shapes))

        expected = problem.expected()
        rounding = 2.0**-7 * (rest[0].abs().max() + first[0].abs().max()).item()
        assert torch.allclose(out.double().cpu(), expected.out, atol=rounding)
        assert torch.allclose(lse.double().cpu(), expected.lse, atol=2.0**-6)

    def test_flat_lengths_and_sinks(self, device: str) -> None:
        """Lengths `[batch]` and sinks `[heads]` of xqa equal those of two dimensions."""
        problem = SMALL.build(device)

        problem.check(XQA.run(problem, seq_lens=problem.seq_lens, sinks=problem.sinks))

    def test_semaphores_are_not_accessed(self, device: str) -> None:
        """The semaphores are neither read nor written."""
        arguments = xqa_arguments(LONG.build(device))

        mlagen.xqa.xqa(**arguments)

        assert (arguments["semaphores"].view(torch.int32) == 7).all()

    @pytest.mark.parametrize("values", ["shared", "other cache"])
    def test_views_of_xqa_mla(self, values: str, device: str) -> None:
        """Lengths may be flat, V a view of K, and strides of axes of size 1 are ignored."""
        case = MlaCase(seq_lens=(70, 3, 0), dtype=E4M3, cache_layout="[P,ps,1,d]")
        case = replace(case, values=values, output_scale=0.5, bmm2_scales_scores=True)
        problem = case.build(device)
        v_cache = xqa_mla_arguments(problem)["v_cache"]
        pages, tokens, width = v_cache.squeeze(2).stride()
        strided = v_cache.as_strided(v_cache.shape, (pages, tokens, 9, width))

        problem.check(XQA_MLA.run(problem, v_cache=strided))
        if values == "shared":
            strided = v_cache[..., :512]
        problem.check(XQA_MLA.run(problem, v_cache=strided, seq_lens=problem.seq_lens))

    @pytest.mark.parametrize("world", [1, 2, 3, 8])
    @pytest.mark.parametrize("q_lens", [None, (3, 2, 5)], ids=["uniform", "ragged"])
    def test_the_ranks_of_dcp_merge_to_the_whole(
        self, q_lens: tuple[int, ...] | None, world: int, device: str
    ) -> None:
        """Each with every `world`-th token, and a sink on one of them; some rows attend to none."""
        case = GqaCase(seq_lens=(40, 6, 300), q_len=3, q_lens=q_lens, page_size=1, sink=3.0)
        problem = case.build(device)
        new = torch.tensor(case.lens, dtype=torch.int32, device=device)
        states = []
        for rank in range(world):
            local = ints(*(len(range(rank, length, world)) for length in case.seq_lens))
            ranks = {"cp_world": world, "cp_rank": rank}
            out, lse = trtllm_gqa_with_lse(
                problem,
                block_tables=problem.block_tables[:, rank::world].contiguous(),
                seq_lens=local.to(device),
                causal_seqlens_kv_global=problem.seq_lens - new,
                sinks=None if rank else problem.sinks,
                **ranks,
            )
            states.append((out, lse))

        out, lse = merge_states(*(torch.stack(each, dim=1) for each in zip(*states, strict=True)))

        expected = problem.expected()
        tolerance = output_tolerance(out.dtype, expected)
        tolerance += UNIT_ROUNDOFF[out.dtype] * expected.magnitude
        assert_close(out.float(), expected.out, tolerance, "out")
        assert_close(lse, expected.lse.float(), lse_tolerance(out.dtype, expected), "lse")

    @pytest.mark.parametrize("page_size", [1, 64])
    def test_tokens_of_a_rank_past_its_queries_may_be_nan(
        self, page_size: int, device: str
    ) -> None:
        """What only later query tokens, or none, attend to has no effect on a query token."""
        case = GqaCase(
            seq_lens=(100,), q_len=4, page_size=page_size, cp_world=2, cp_rank=1, committed=(190,)
        )
        clean, poisoned = case.build(device), case.build(device)
        masked = [at for at in range(100) if not poisoned.sees(0, 1, at)]
        for position in masked:
            poisoned.poison(0, position)

        out, lse = trtllm_gqa_with_lse(poisoned)

        assert len(masked) == 4
        wanted, wanted_lse = trtllm_gqa_with_lse(clean)
        assert torch.equal(out[:2], wanted[:2])
        assert torch.equal(lse[:2], wanted_lse[:2])
        assert out[3].isnan().all()

    def test_the_default_layout_has_heads_before_tokens(self, device: str) -> None:
        """`kv_layout` is HND unless it is passed."""
        problem = GqaCase(seq_lens=(70, 3), layout="HND").build(device)
        arguments = trtllm_gqa_arguments(problem)
        del arguments["kv_layout"]

        problem.check(TRTLLM.function(**arguments))

    def test_a_new_output_has_the_dtype_that_is_asked_for(self, device: str) -> None:
        """`out_dtype` is that of the query, or e4m3 from a cache of e4m3."""
        case = GqaCase(seq_lens=(70, 3), kv="e4m3", out_dtype=E4M3, output_scale=0.5)
        problem = case.build(device)

        problem.check(TRTLLM.call(problem, out=None, out_dtype=E4M3))

    @pytest.mark.parametrize("call", [trtllm, planned])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, E4M3], ids=str)
    def test_an_e4m3_query(self, dtype: torch.dtype, call: Any, device: str) -> None:
        """It gives the bits of the same query in 16 bits; its output is e4m3 by default."""
        problem = GqaCase(seq_lens=(70, 3), kv="e4m3").build(device)
        query, said = problem.query.to(E4M3), None if dtype is E4M3 else dtype

        out = call(problem, query, said)

        assert out.dtype is dtype
        wide = query.to(torch.bfloat16 if said is None else said)
        assert torch.equal(out.float(), call(problem, wide, dtype).float())

    def test_an_e4m3_query_without_storage(self, device: str) -> None:
        """It is rejected before it is converted."""
        problem = GqaCase(seq_lens=(70, 3), kv="e4m3").build(device)
        query = problem.query.to(E4M3)
        query.untyped_storage().resize_(0)

        with pytest.raises(ArgumentError, match=r"query: .* got a tensor without storage"):
            TRTLLM.call(problem, query=query, out=None)

    def test_a_scale_with_a_factor_of_log2_e(self, device: str) -> None:
        """`bmm1_scale_log2` is used instead of `bmm1_scale`."""
        problem = SMALL.build(device)
        scale = torch.tensor([problem.case.scale * math.log2(math.e)], device=device)

        problem.check(TRTLLM.call(problem, bmm1_scale=7.0, bmm1_scale_log2=scale))


@pytest.mark.parametrize(
    "change",
    [{"window_left": 30}, {"q_len": 1}, {"mask": None}],
    ids=["a window wider by one", "a token too many", "another mask"],
)
def test_the_check_sees_a_token_too_many(change: dict[str, object]) -> None:
    """The check detects a row that attends to one token too many."""
    problem = GqaCase(seq_lens=(50, 33), q_len=2, window=30, mask="random", seed=3).build("cpu")
    assert problem.bits is not None
    problem.bits[:] = torch.eye(2).repeat(2, 16).bool()  # each draft attends to itself
    if "q_len" in change:  # the other token of the first request
        problem.bits[0, 1] = True
        out = decode_gqa(problem)
        problem.bits[0, 1] = False
    else:
        out = decode_gqa(problem, **change)

    with pytest.raises(AssertionError, match="elements off"):
        problem.check(out)


@pytest.mark.parametrize(
    ("given", "passed"),
    [(None, True), (True, True), (False, False), (1, True), (0, False), (np.bool_(0), False)],
)
def test_pdl_is_used_unless_disabled(
    given: object, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None means True, and the ints 0 and 1 are accepted as bools."""
    seen = []

    run = GQA.run

    def record(inputs: GqaArgs, *rest: Any) -> tuple[torch.Tensor, ...]:
        seen.append(inputs.enable_pdl)
        return run(inputs, *rest)

    monkeypatch.setattr(GQA, "run", record)

    decode_gqa(SMALL.build("cpu"), enable_pdl=given)

    assert seen == [passed]
