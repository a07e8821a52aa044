"""Block-sparse and token-sparse grouped-query decode, for every device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import mlagen
from tests.families.rejections import displaced
from tests.problems.gqa import GqaCase
from tests.problems.head_tables import HEAD_TABLES_CASES, check_head_tables
from tests.problems.problem import E4M3, bf16, ints
from tests.problems.sparse_gqa import SparseCase, decode_sparse
from tests.problems.sparse_gqa_cases import CASES, msa, qsa
from tests.problems.top_k import TOP_K_CASES, check_top_k
from tests.rejected import Row, rejections_of, rejects

USUAL = {
    "msa": msa("usual", seq_lens=(500, 130, 0), q_len=2),
    "qsa": qsa("usual", seq_lens=(300, 70), requests=(1, 0, 0), gate=True),
}
FUNCTIONS: dict[str, Any] = {
    "msa": mlagen.msa_ops.msa_sparse_decode_attention,
    "qsa": mlagen.sparse.qsa_sparse_paged_attention,
}
# Keywords with values that change no result.
UNUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "msa": {
        "partial_dtype": (torch.float32, E4M3),
        "force_fused": (True, False),
        "workspace": (object(),),
        "softmax_scale": (128**-0.5,),
        "causal": (True,),
    },
    "qsa": {"use_prefill_config": (True, False), "backend": ("auto", "cuda", "triton")},
}


class TestSparseGqa:
    """Rules of both entry points, on the device of the fixture."""

    @pytest.mark.parametrize("kind", FUNCTIONS)
    def test_the_order_of_indices(self, kind: str, device: str) -> None:
        """Permuted indices give the same result, and a view of them the same bits."""
        problem = USUAL[kind].build(device)
        out, lse = decode_sparse(problem)
        name = "q2k_indices" if kind == "msa" else "logical_indices"
        given = problem.indices
        n = given.shape[-1] - (kind == "qsa")
        order = torch.randperm(n).tolist()
        permuted = given[..., [*order, *range(n, given.shape[-1])]]

        problem.check(*decode_sparse(problem, **{name: permuted}), natural=True)
        others = [given.contiguous(), given.view(torch.uint32) if kind == "qsa" else given.clone()]
        for other in others:
            again = decode_sparse(problem, **{name: other})
            assert torch.equal(out, again[0])
            assert torch.equal(lse, again[1])

    @pytest.mark.parametrize("kind", FUNCTIONS)
    def test_given_outputs(self, kind: str, device: str) -> None:
        """They get the same numbers, planned and replayed, in either base; no LSE, no tuple."""
        problem = USUAL[kind].build(device)
        out, lse = decode_sparse(problem)
        wide = torch.full((*out.shape[:-1], 2 * out.shape[-1]), 7.0, device=device).to(out.dtype)
        targets = [torch.empty_like(out)]
        if kind == "qsa":
            targets.append(wide[..., : out.shape[-1]])
        for target in targets:
            for _ in range(2):
                target.fill_(3.0)
                target_lse = torch.empty_like(lse)
                results = decode_sparse(problem, out=target, lse=target_lse)
                assert results[0] is target
                assert torch.equal(target, out)
                assert torch.equal(target_lse, lse)
        assert (wide[..., out.shape[-1] :] == 7.0).all()
        assert torch.equal(FUNCTIONS[kind](**problem.arguments()), out)
        if kind == "qsa":
            _, in_base2 = decode_sparse(problem, return_lse_base="base2")
            assert torch.allclose(in_base2 * math.log(2), lse)

    @pytest.mark.parametrize("kind", FUNCTIONS)
    def test_a_keyword_changes_no_result(self, kind: str, device: str) -> None:
        """Neither a default nor a keyword of another backend does."""
        problem = USUAL[kind].build(device)
        out, _ = decode_sparse(problem)
        for keyword, values in UNUSED[kind].items():
            for value in values:
                assert torch.equal(decode_sparse(problem, **{keyword: value})[0], out)

    def test_a_flat_gate_and_no_gate(self, device: str) -> None:
        """A gate may have the heads in its last dim; without one the output is not multiplied."""
        problem = USUAL["qsa"].build(device)
        assert problem.gates is not None
        out, _ = decode_sparse(problem)
        plain, _ = decode_sparse(problem, output_gate=None)

        assert torch.equal(decode_sparse(problem, output_gate=problem.gates.flatten(1))[0], out)
        gated = plain.float() * torch.sigmoid(problem.gates.float())
        assert torch.allclose(out.float(), gated, rtol=2.0**-8, atol=2.0**-20)

    @pytest.mark.parametrize("kind", FUNCTIONS)
    def test_no_query_tokens(self, kind: str, device: str) -> None:
        """Outputs are empty."""
        given = USUAL[kind].build(device).arguments()
        for name in ("q", "output_gate", "token_to_req", "logical_indices", "page_table"):
            if given.get(name) is not None:
                given[name] = given[name][:0]
        if kind == "msa":
            given |= {"q2k_indices": given["q2k_indices"][:, :0]}
            given |= {"seqused_k": given["seqused_k"][:0], "return_softmax_lse": True}
        else:
            given["return_lse"] = True

        out, lse = FUNCTIONS[kind](**given)

        assert out.shape == given["q"].shape
        assert lse.shape == given["q"].shape[:-1]

    @pytest.mark.parametrize("case", HEAD_TABLES_CASES, ids=str)
    def test_block_tables_of_each_kv_head(self, case: GqaCase, device: str) -> None:
        """Each KV head has tokens of its own, by ``enable_block_sparse_attention``."""
        check_head_tables(case, device)

    @pytest.mark.parametrize("case", TOP_K_CASES, ids=str)
    def test_top_k_indices(self, case: GqaCase, device: str) -> None:
        """Each query token has tokens of the cache of its own, by ``sparse_top_k``."""
        check_top_k(case, device)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_edge_cases(case: SparseCase) -> None:
    """Every case gives the float64 result on the CPU, and what no index names has no effect."""
    problem = case.build("cpu")

    problem.check(*decode_sparse(problem), natural=True)


PAGES = bf16(9, 2, 128, 128)
SLOTS = bf16(9, 16, 2, 64)
ROWS: dict[str, list[Row]] = {
    "msa": [
        ("q", None, ": expected a torch.Tensor, got NoneType"),
        ("q", bf16(6, 1024), ".ndim: expected 3, got 2"),
        ("q", bf16(6, 7, 128), ".shape[-2]: expected a multiple of 2 (heads of k), got 7"),
        ("q", torch.zeros(6, 8, 128), ".dtype: expected torch.bfloat16 or torch.float16, got ..."),
        ("", {"seqlen_q": 4}, "q.shape[0]: expected a multiple of 4 (seqlen_q), got 6"),
        ("seqlen_q", 0, ": expected an int, 1 or more, got 0"),
        ("k", bf16(9, 128, 2, 64)[0], ".ndim: expected 4, got 3"),
        ("k", bf16(9, 2, 64, 128), ".shape[2]: expected 128 (tokens of a block), got 64"),
        ("k", PAGES.to(torch.uint8), ".dtype: not implemented, expected a cache without ..."),
        ("k", PAGES.half(), ".dtype: expected torch.bfloat16 or ... (the first is that of q), ..."),
        ("v", None, ": expected a torch.Tensor, got NoneType"),
        ("v", bf16(8, 2, 128, 64), ".shape[-1]: expected 128 (k.shape[-1]), got 64"),
        ("v", PAGES, ".shape: expected ... (shape of k, or another last dim), got ..."),
        ("page_table", None, ": expected a torch.Tensor, got NoneType"),
        ("page_table", ints(0, 1, 2)[:, None].long(), ".dtype: expected torch.int32 or ..."),
        ("page_table", ints(0, 1)[:, None], ".shape[0]: expected 3 (batch), got 2"),
        ("seqused_k", None, ": expected a torch.Tensor, got NoneType"),
        ("seqused_k", ints(1, 2), ".shape: expected [3] or [3, 1] (batch of q), got [2]"),
        ("cu_seqlens_k", ints(0, 1), ": not implemented, expected None, got ..."),
        ("causal", False, ": not implemented, expected True, got False"),
        ("causal", "yes", ": expected a bool, got 'yes'"),
        ("k_scale", torch.ones(1), ": not implemented, expected None, got ..."),
        ("v_scale", torch.ones(1), ": not implemented, expected None, got ..."),
        ("q_offset", 3, ": not implemented, expected None, got 3"),
        ("softmax_scale", "1", ": expected a float, got '1'"),
        ("k_global_scale", "1", ": expected a float, got '1'"),
        ("v_global_scale", "1", ": expected a float or a torch.float32 tensor ..., got '1'"),
        ("return_softmax_lse", "no", ": expected a bool, got 'no'"),
        ("q2k_indices", None, ": expected a torch.Tensor, got NoneType"),
        ("q2k_indices", ints(1, 2)[None], ".ndim: expected 3, got 2"),
        ("q2k_indices", torch.zeros(2, 6, 4), ".dtype: expected torch.int32 or torch.uint32, ..."),
        ("q2k_indices", ints(0).expand(3, 6, 4), ".shape[0]: expected 2 (KV heads), got 3"),
        ("q2k_indices", ints(0).expand(2, 5, 4), ".shape[-2]: expected 6 (tokens of q), got 5"),
        ("q2k_indices", ints(0).expand(2, 6, 0), ".shape[-1]: expected 1 index or more, got 0"),
        ("q2k_indices", ints(0).expand(2, 6, 65), ".shape[-1]: expected 64 or less, got 65"),
        ("q2k_indices", ints(0).expand(2, 6, 4), ".stride(-1): expected 1, got 0"),
        ("out", bf16(6, 8, 256)[..., ::2], " must be contiguous: expected no gaps ..."),
        ("out", torch.zeros(6, 8, 128), ".dtype: expected torch.bfloat16 (...), got torch.float32"),
        ("lse", torch.zeros(5, 8), ".shape: expected [6, 8] or ..., got [5, 8]"),
    ],
    "qsa": [
        ("q", bf16(3, 384), ".ndim: expected 3, got 2"),
        ("k_cache", SLOTS[0], ".ndim: expected 4, got 3"),
        ("v_cache", None, ": expected a torch.Tensor, got NoneType"),
        ("k_sf", bf16(1), ": expected None for a cache of torch.bfloat16, got a tensor"),
        ("", {"v_sf": bf16(1)}, "k_sf: expected None for a cache of torch.bfloat16, got a tensor"),
        (
            "",
            {
                **dict.fromkeys(("k_cache", "v_cache"), SLOTS.to(E4M3)),
                **dict.fromkeys(("k_sf", "v_sf"), torch.ones(9, 16, 2)),
            },
            "no sparse GQA decode kernel for decode context parallel or scales of tokens",
        ),
        ("logical_indices", ints(1, 2), ".ndim: expected 2, got 1"),
        ("logical_indices", ints(1, 2)[None], ".shape[-2]: expected 3 (tokens of q), got 1"),
        (
            "logical_indices",
            ints(1, 2, 3)[:, None],
            ".shape[-1]: expected 2 columns (indices and their number) or more, got 1",
        ),
        ("block_table", ints(0, 1), ".ndim: expected 2, got 1"),
        ("block_table", None, ": expected a torch.Tensor, got NoneType"),
        ("token_to_req", None, ": expected a torch.Tensor, got NoneType"),
        ("token_to_req", ints(0, 1), ".shape: expected [3] (tokens of q), got [2]"),
        ("token_to_req", ints(0, 1, 1).long(), ".dtype: expected torch.int32 or ..."),
        ("use_prefill_config", None, ": expected a bool, got None"),
        ("backend", "fa2", ": expected one of auto, cuda, triton, got 'fa2'"),
        ("k_scale", "1", ": expected a float, got '1'"),
        ("v_scale", "1", ": expected a float, got '1'"),
        ("output_gate", bf16(3, 6, 32), ".shape: expected [3, 6, 64] or [3, 384] (...), got ..."),
        ("output_gate", bf16(3, 6, 64).half(), ".dtype: expected torch.bfloat16 (dtype of q), ..."),
        ("output_gate", displaced(bf16(3, 6, 64)), ".data_ptr(): expected a multiple of 8, ..."),
        ("output_gate", bf16(3, 6, 128)[..., ::2], " must be contiguous: expected no gaps ..."),
        ("out", bf16(3, 6, 65)[..., :64].half(), ".dtype: expected torch.bfloat16 (dtype of q)..."),
        ("out", bf16(3, 5, 64), ".shape: expected [3, 6, 64] (shape of q), got [3, 5, 64]"),
        ("out", bf16(3, 6, 128)[..., ::2], ".stride(-1): expected 1, got 2"),
        ("return_lse_base", "10", ": expected one of base2, basee, got '10'"),
    ],
}


@rejections_of(ROWS)
def test_a_call_is_rejected(call: str, changes: dict[str, Any], message: str) -> None:
    """The message has argument, rule and value, and nothing is written."""
    problem = USUAL[call].build("cpu")
    out, lse = problem.new_out(7.0), torch.full(problem.query.shape[:-1], 7.0)

    with rejects(message):
        FUNCTIONS[call](**problem.arguments(out=out, lse=lse) | changes)

    assert (out == 7.0).all()
    assert (lse == 7.0).all()
