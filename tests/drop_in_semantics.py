"""Tests of FlashInfer compatibility for every device."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch

import mlagen
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.problems.batch_mla import SOME, plan_arguments, run, wrapper_of
from tests.problems.entry_points import decode, decode_gqa, decode_with_lse, run_xqa
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, MlaProblem

# Keywords that change no result.
NO_OPS: dict[str, tuple[Any, ...]] = {
    "skip_softmax_threshold_scale_factor": (0.0, 0.5, 1e39, -1),
    "use_fp16_softmax": (True, False, 1),
    "cute_dsl_impl": ("modular", "monolithic"),
    "kv_scale_format": ("pow2_fp32", "arbitrary_fp32", "POW2-FP32", "Auto"),
    "is_var_seq": (False,),
    "return_lse_base": (None,),
}
_SINGLE = MlaCase(name="", seq_lens=(70, 3))
_SPARSE = MlaCase(name="", seq_lens=(300, 300), q_len=2, kv_format="fp8_ds_mla", top_k=70)
_HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


class DropInSemantics:
    """Device-independent tests; a subclass sets the device."""

    device: ClassVar[str]

    @pytest.mark.parametrize(
        ("keyword", "value"), [(keyword, value) for keyword in NO_OPS for value in NO_OPS[keyword]]
    )
    @pytest.mark.parametrize("case", [_SINGLE, _SPARSE], ids=["dense", "sparse"])
    def test_a_tuning_keyword_changes_no_bit(
        self, case: MlaCase, keyword: str, value: object
    ) -> None:
        """Keywords for lower precision or for an implementation change nothing."""
        problem = case.build(self.device)

        results = decode_with_lse(problem, **{keyword: value})

        assert all(map(torch.equal, results, decode_with_lse(problem)))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
    def test_a_semaphore_buffer_is_not_written(self, dtype: torch.dtype) -> None:
        """Calls accept the buffer, also on the fast path; buffer and result keep every bit."""
        problem = _SINGLE.build(self.device)
        buffer = torch.full((4096,), 7, dtype=dtype, device=self.device)
        out = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16, device=self.device)
        workspace = problem.arguments()["workspace_buffer"]
        given = {"out": out, "workspace_buffer": workspace, "multi_ctas_kv_counter_buffer": buffer}
        expected = decode(problem)

        for _ in range(3):
            out.zero_()
            assert torch.equal(decode(problem, **given), expected)

        assert (buffer == 7).all()

    @pytest.mark.parametrize("lens", [[[5, 70], [1000, -3]], [[0, 1], [69, 2]]], ids=["odd", "few"])
    @pytest.mark.parametrize("is_flat", [True, False], ids=["flat", "by sequence"])
    def test_backend_sparse_takes_topk_lengths(
        self, lens: list[list[int]], *, is_flat: bool
    ) -> None:
        """With that backend `seq_lens` is the number of valid top-k indices per query token."""
        problem = _SPARSE.build(self.device)
        lengths = torch.tensor(lens, dtype=torch.int32, device=self.device)

        results = decode_with_lse(
            problem, backend="sparse", seq_lens=lengths.flatten() if is_flat else lengths
        )

        expected = decode_with_lse(problem, sparse_mla_top_k_lens=lengths.flatten())
        assert all(map(torch.equal, results, expected))

    @pytest.mark.parametrize("backend", ["auto", "sparse"])
    def test_without_lengths_all_topk_indices_count(self, backend: str) -> None:
        """`seq_lens` of None attends to all top-k indices."""
        problem = _SPARSE.build(self.device)
        whole = torch.full((4,), 70, dtype=torch.int32, device=self.device)
        expected = decode_with_lse(problem, sparse_mla_top_k_lens=whole)

        results = decode_with_lse(problem, backend=backend, seq_lens=None)

        assert all(map(torch.equal, results, expected))
        if backend == "sparse":  # which reads no sequence lengths either
            few = torch.ones(2, dtype=torch.int32, device=self.device)
            results = decode_with_lse(problem, backend=backend, seq_lens=few)
            assert all(map(torch.equal, results, expected))

    def test_ragged_topk_indices_without_lengths(self) -> None:
        """`seq_lens` of None works for ragged query lengths, too."""
        case = MlaCase(name="", seq_lens=(300, 300), q_lens=(1, 3), top_k=70)
        problem = case.build(self.device)
        whole = torch.full((4,), 70, dtype=torch.int32, device=self.device)

        out = decode(problem, seq_lens=None)

        assert torch.equal(out, decode(problem, sparse_mla_top_k_lens=whole))

    def test_backend_sparse_with_one_query_token(self) -> None:
        """Sequence lengths and top-k lengths are then the same."""
        case = MlaCase(name="", seq_lens=(300, 3), kv_format="fp8_ds_mla", top_k=70)
        problem = case.build(self.device)

        out = decode(problem, backend="sparse")

        problem.check(out)

    @_HALVES
    def test_sinks_of_16_bits(self, dtype: torch.dtype) -> None:
        """16-bit sinks count as their values, in every entry point with sinks."""
        mla = MlaCase(name="", seq_lens=(70, 3), with_sinks=True).build(self.device)
        gqa = GqaCase(name="", seq_lens=(70, 3), sink=3.0).build(self.device)
        assert mla.sinks is not None
        assert gqa.sinks is not None
        half, wide = mla.sinks.to(dtype), mla.sinks.to(dtype).float()
        of_gqa, wide_of_gqa = gqa.sinks.to(dtype), gqa.sinks.to(dtype).float()

        for sinks in (half, [half]):
            assert torch.equal(decode(mla, sinks=sinks), decode(mla, sinks=wide))
        for run_one in (decode_gqa, run_xqa):
            expected = run_one(gqa, sinks=wide_of_gqa)
            for _ in range(3):  # the fast path gets new memory at each call
                assert torch.equal(run_one(gqa, sinks=of_gqa), expected)

    def test_a_bf16_output_of_an_fp16_query(self) -> None:
        """A bf16 `out` holds the fp16 result, rounded once more."""
        problem = MlaCase(name="", seq_lens=(70, 3), dtype=torch.float16).build(self.device)
        out = torch.empty(2, 16, 512, dtype=torch.bfloat16, device=self.device)

        for _ in range(3):
            out.zero_()
            assert decode(problem, out=out) is out
            assert torch.equal(out, decode(problem)[:, 0].bfloat16())

    def test_return_lse_base_is_positional(self) -> None:
        """`return_lse_base` is the last positional argument."""
        problem = _SINGLE.build(self.device)
        function: Any = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
        parameters = inspect.signature(function).parameters
        given = problem.arguments(return_lse=True, return_lse_base="basee")

        positional = [given.get(name, p.default) for name, p in parameters.items()]

        assert len(positional) == 33
        expected = decode_with_lse(problem, return_lse_base="basee")
        assert all(map(torch.equal, function(*positional), expected))

    def test_q_len_per_req_of_none(self) -> None:
        """`q_len_per_req` of None is one query token."""
        problem = GqaCase(name="", seq_lens=(70, 3)).build(self.device)

        out = decode_gqa(problem, q_len_per_req=None)

        problem.check(out)

    @pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "beside the query"])
    def test_offsets_longer_than_the_batch(self, metadata: str | None) -> None:
        """Entries of both `indptr` past the sequences of `kv_len_arr` are ignored."""
        problem = SOME.build(self.device)

        wrapper = wrapper_of(problem, metadata=metadata, **_longer(problem, metadata))

        problem.check(run(wrapper, problem))

    def test_longer_offsets_in_cuda_graph_buffers(self) -> None:
        """The buffers of a CUDA graph wrapper may be longer, too."""
        problem = SOME.build(self.device)
        sizes = {"qo_indptr": 9, "kv_indptr": 6, "kv_indices": 99, "kv_len_arr": 4}
        buffers: dict[str, Any] = {
            name: torch.zeros(size, dtype=torch.int32, device=self.device)
            for name, size in sizes.items()
        }
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=self.device)
        wrapper = BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True, **buffers)

        wrapper.plan(**plan_arguments(problem, **_longer(problem, None)))

        problem.check(run(wrapper, problem))
        assert (buffers["qo_indptr"][5:] == 0).all()


def _longer(problem: MlaProblem, metadata: str | None) -> dict[str, Any]:
    """Return the offsets of a plan followed by invalid entries."""
    given = plan_arguments(problem, metadata=metadata)
    names = ("qo_indptr", "kv_indptr")
    invalid = torch.tensor([-7, 2**31 - 1, 0], dtype=torch.int32, device=given["qo_indptr"].device)
    return {name: torch.cat([given[name], invalid]) for name in names}
