"""FlashInfer compatibility on the CPU: signatures and semantics."""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any

import pytest
import torch

import mlagen
from mlagen.mla.wrapper import BatchMLAPagedAttentionWrapper
from tests.problems.batch_mla import SOME, plan_arguments, run, wrapper_of
from tests.problems.entry_points import decode, decode_gqa, decode_with_lse, run_xqa
from tests.problems.gqa import GqaCase
from tests.problems.mla import MlaCase, MlaProblem

_SINGLE = MlaCase(seq_lens=(70, 3))
_SPARSE = MlaCase(seq_lens=(300, 300), q_len=2, kv_format="fp8_ds_mla", top_k=70)
# Each function with its parameters; those after the star are by keyword only.
SIGNATURES = """
mla.trtllm_batch_decode_with_kv_cache_mla
query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables
seq_lens max_seq_len
sparse_mla_top_k=0 out=None bmm1_scale=1.0 bmm2_scale=1.0 sinks=None
skip_softmax_threshold_scale_factor=None enable_pdl=None backend='auto' is_var_seq=True
uses_shared_paged_kv_idx=True lse=None return_lse=False cute_dsl_impl='auto' kv_scale_format='auto'
cum_seq_lens_q=None max_q_len=None multi_ctas_kv_counter_buffer=None sparse_mla_top_k_lens=None
enable_dcp=False cp_world=1 cp_rank=0 causal_seqlens_kv_global=None use_fp16_softmax=None
return_lse_base=None
* batch_invariant=None

mla.trtllm_batch_decode_sparse_mla_dsv4
query swa_kv_cache workspace_buffer sparse_indices=None compressed_kv_cache=None
sparse_topk_lens=None seq_lens=None out=None bmm1_scale=1.0 bmm2_scale=1.0 sinks=None
kv_layout='HND' cum_seq_lens_q=None max_q_len=None enable_pdl=None swa_topk_lens=None
extra_sparse_indices=None extra_sparse_topk_lens=None backend='auto' hca_swa_indices=None
hca_compressed_block_tables=None hca_seq_lens=None hca_is_causal=True hca_use_persistent=False
hca_sparse_indices_format=None remapped_sparse_indices_buffer=None
sparse_indices_are_storage_offsets=None dsv4_inv_rope_cos_sin_cache=None dsv4_output_scale=None
sparse_topk_lens_offset=0 multi_ctas_kv_counter_buffer=None
* kv_cache_format='fp8' lse=None return_lse=False return_lse_base='base2' batch_invariant=None

mla.xqa_batch_decode_with_kv_cache_mla
query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables
seq_lens max_seq_len
out=None bmm1_scale=1.0 bmm2_scale=1.0 sinks=None enable_pdl=None
* batch_invariant=None

decode.xqa_batch_decode_with_kv_cache
query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 bmm2_scale=1.0
window_left=-1 out=None sinks=None kv_layout='NHD' enable_pdl=None q_len_per_req=1 o_scale=1.0
mask=None kv_cache_sf=None q_cu_seq_lens=None
* lse=None return_lse=False return_lse_base='base2' causal=True logits_soft_cap=None
batch_invariant=None

decode.trtllm_batch_decode_with_kv_cache
query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 bmm2_scale=1.0
window_left=-1 out=None out_dtype=None o_sf_scale=None o_sf_vec_size=None sinks=None
kv_layout='HND' enable_pdl=None backend='auto' q_len_per_req=1 o_scale=1.0 mask=None max_q_len=None
cum_seq_lens_q=None skip_softmax_threshold_scale_factor=None kv_cache_sf=None
uses_shared_paged_kv_idx=True lse=None return_lse=False bmm1_scale_log2=None
multi_ctas_kv_counter_buffer=None enable_block_sparse_attention=False cp_world=1 cp_rank=0
causal_seqlens_kv_global=None bf16q_fp8kv_transform_mode=None request_order=None
request_order_plan=None sparse_top_k=0 length_aware_schedule=False
* batch_invariant=None

decode.BatchDecodeWithPagedKVCacheWrapper.__init__
self float_workspace_buffer kv_layout='NHD' use_cuda_graph=False use_tensor_cores=False
paged_kv_indptr_buffer=None paged_kv_indices_buffer=None paged_kv_last_page_len_buffer=None
backend='auto' jit_args=None jit_kwargs=None

decode.BatchDecodeWithPagedKVCacheWrapper.plan
self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size
pos_encoding_mode='NONE' window_left=-1 logits_soft_cap=None q_data_type='float16' kv_data_type=None
o_data_type=None data_type=None sm_scale=None rope_scale=None rope_theta=None non_blocking=True
block_tables=None seq_lens=None fixed_split_size=None disable_split_kv=False q_len_per_req=1
* window_right=0 is_causal=None use_token_head_sf=False head_dim_vo=None batch_invariant=None

decode.BatchDecodeWithPagedKVCacheWrapper.run
self q paged_kv_cache *args
q_scale=None k_scale=None v_scale=None out=None lse=None return_lse=False enable_pdl=None
window_left=None sinks=None q_len_per_req=None skip_softmax_threshold_scale_factor=None
kv_cache_sf=None logits_soft_cap=None

decode.BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer
self float_workspace_buffer int_workspace_buffer

decode.BatchDecodeWithPagedKVCacheWrapper.forward
self q paged_kv_cache pos_encoding_mode='NONE' q_scale=None k_scale=None v_scale=None window_left=-1
logits_soft_cap=None sm_scale=None rope_scale=None rope_theta=None
* return_lse=False

decode.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
workspace_buffer indptr_buffer indices_buffer last_page_len_buffer kv_layout='NHD'
use_tensor_cores=False

decode.fast_decode_plan
self indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size
pos_encoding_mode='NONE' window_left=-1 logits_soft_cap=None q_data_type=None kv_data_type=None
data_type=None sm_scale=None rope_scale=None rope_theta=None non_blocking=True fixed_split_size=None
disable_split_kv=False q_len_per_req=1 global_override_indptr_cpu=None

msa_ops.msa_sparse_decode_attention
q k v q2k_indices
* page_table=None seqused_k=None cu_seqlens_k=None seqlen_q=1 causal=True softmax_scale=None
return_softmax_lse=False k_scale=None v_scale=None k_global_scale=None v_global_scale=None
q_offset=None partial_dtype=None force_fused=None workspace=None out=None lse=None
batch_invariant=None

sparse.qsa_sparse_paged_attention
q k_cache v_cache logical_indices block_table token_to_req use_prefill_config out=None k_scale=None
v_scale=None
* output_gate=None k_sf=None v_sf=None backend='auto' lse=None return_lse=False
return_lse_base='base2' batch_invariant=None

xqa.xqa
q k_cache v_cache page_table seq_lens output workspace_buffer semaphores num_kv_heads
page_size sinks=None q_scale=1.0 kv_scale=1.0 sliding_win_size=0 kv_layout='NHD' sm_count=None
enable_pdl=None rcp_out_scale=1.0 q_seq_len=1 mask=None
* q_cu_seq_lens=None k_sf_cache=None v_sf_cache=None lse=None lse_base='base2' causal=True
batch_invariant=None

xqa.xqa_mla
q k_cache v_cache page_table seq_lens output workspace_buffer semaphores page_size
q_scale=1.0 kv_scale=1.0 sm_count=None enable_pdl=None
* batch_invariant=None

mla.BatchMLAPagedAttentionWrapper.__init__
self float_workspace_buffer use_cuda_graph=False qo_indptr=None kv_indptr=None kv_indices=None
kv_len_arr=None backend='auto'

mla.BatchMLAPagedAttentionWrapper.plan
self qo_indptr=None kv_indptr=None kv_indices=None kv_len_arr=None num_heads=None head_dim_ckv=None
head_dim_kpe=None page_size=None causal=None sm_scale=None q_data_type=None kv_data_type=None
use_profiler=False
* metadata=None cum_seq_lens_q=None block_tables=None seq_lens=None max_q_len=None query_layout=None
kv_cache_layout=None lse_mode='none' output_dtype=None output_scale='none' scale_mode='default'
skip_softmax=False enable_pdl=None use_sinks=False batch_invariant=None

mla.BatchMLAPagedAttentionWrapper.run
self q_nope=None q_pe=None ckv_cache=None kpe_cache=None out=None lse=None return_lse=False
profiler_buffer=None kv_len=None page_table=None return_lse_base_on_e=False o_scale=None
* query=None kv_cache=None ckv_scale=None ckv_scale_arr=None kpe_scale=None sinks=None
skip_softmax_threshold_scale_factor=None bmm1_scale=None bmm2_scale=None

mla.flare_mla_decoding
q k mask valid_length scale
* output=None ragged=False num_partitions=None q_scale=None per_token_scale_rope_aware=False
kv_scales=None batch_invariant=None
"""


@pytest.mark.parametrize("wanted", SIGNATURES.split("\n\n"), ids=lambda text: text.split()[0])
def test_the_signatures(wanted: str) -> None:
    """Names, order, kinds and defaults of the parameters are those of the library replaced."""
    name, *parameters = wanted.split()
    module, public, *_ = name.split(".")
    assert public in getattr(mlagen, module).__all__
    signature = inspect.signature(attrgetter(name)(mlagen))
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]

    shown = str(signature.replace(parameters=plain, return_annotation=signature.empty))

    assert shown == f"({', '.join(parameters)})"


class TestDropIn:
    """Semantics of the compatible calls, on the device of the fixture."""

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
    def test_a_semaphore_buffer_is_not_written(self, dtype: torch.dtype, device: str) -> None:
        """Calls accept the buffer, also on the fast path; buffer and result keep every bit."""
        problem = _SINGLE.build(device)
        buffer = torch.full((4096,), 7, dtype=dtype, device=device)
        out = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16, device=device)
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
        self, lens: list[list[int]], device: str, *, is_flat: bool
    ) -> None:
        """With that backend `seq_lens` is the number of valid top-k indices per query token."""
        problem = _SPARSE.build(device)
        lengths = torch.tensor(lens, dtype=torch.int32, device=device)

        results = decode_with_lse(
            problem, backend="sparse", seq_lens=lengths.flatten() if is_flat else lengths
        )

        expected = decode_with_lse(problem, sparse_mla_top_k_lens=lengths.flatten())
        assert all(map(torch.equal, results, expected))

    @pytest.mark.parametrize("backend", ["auto", "sparse"])
    def test_without_lengths_all_topk_indices_count(self, backend: str, device: str) -> None:
        """`seq_lens` of None attends to all top-k indices."""
        problem = _SPARSE.build(device)
        whole = torch.full((4,), 70, dtype=torch.int32, device=device)
        expected = decode_with_lse(problem, sparse_mla_top_k_lens=whole)

        results = decode_with_lse(problem, backend=backend, seq_lens=None)

        assert all(map(torch.equal, results, expected))
        if backend == "sparse":  # which reads no sequence lengths either
            few = torch.ones(2, dtype=torch.int32, device=device)
            results = decode_with_lse(problem, backend=backend, seq_lens=few)
            assert all(map(torch.equal, results, expected))

    def test_ragged_topk_indices_without_lengths(self, device: str) -> None:
        """`seq_lens` of None works for ragged query lengths, too."""
        problem = MlaCase(seq_lens=(300, 300), q_lens=(1, 3), top_k=70).build(device)
        whole = torch.full((4,), 70, dtype=torch.int32, device=device)

        assert torch.equal(
            decode(problem, seq_lens=None), decode(problem, sparse_mla_top_k_lens=whole)
        )

    def test_backend_sparse_with_one_query_token(self, device: str) -> None:
        """Sequence lengths and top-k lengths are then the same."""
        problem = MlaCase(seq_lens=(300, 3), kv_format="fp8_ds_mla", top_k=70).build(device)

        problem.check(decode(problem, backend="sparse"))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_sinks_of_16_bits(self, dtype: torch.dtype, device: str) -> None:
        """16-bit sinks count as their values, in every entry point with sinks."""
        mla = MlaCase(seq_lens=(70, 3), with_sinks=True).build(device)
        gqa = GqaCase(seq_lens=(70, 3), sink=3.0).build(device)
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

    def test_a_bf16_output_of_an_fp16_query(self, device: str) -> None:
        """A bf16 `out` holds the fp16 result, rounded once more."""
        problem = MlaCase(seq_lens=(70, 3), dtype=torch.float16).build(device)
        out = torch.empty(2, 16, 512, dtype=torch.bfloat16, device=device)

        for _ in range(3):
            out.zero_()
            assert decode(problem, out=out) is out
            assert torch.equal(out, decode(problem)[:, 0].bfloat16())

    def test_return_lse_base_is_positional(self, device: str) -> None:
        """`return_lse_base` is the last positional argument."""
        problem = _SINGLE.build(device)
        function: Any = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
        parameters = inspect.signature(function).parameters
        given = problem.arguments(return_lse=True, return_lse_base="basee")

        positional = [
            given.get(name, p.default)
            for name, p in parameters.items()
            if p.kind is not p.KEYWORD_ONLY
        ]

        assert len(positional) == 33
        expected = decode_with_lse(problem, return_lse_base="basee")
        assert all(map(torch.equal, function(*positional), expected))

    @pytest.mark.parametrize("metadata", ["cpu", None], ids=["on the host", "beside the query"])
    def test_offsets_longer_than_the_batch(self, metadata: str | None, device: str) -> None:
        """Entries of both `indptr` past the sequences of `kv_len_arr` are ignored."""
        problem = SOME.build(device)

        wrapper = wrapper_of(problem, metadata=metadata, **_longer(problem, metadata))

        problem.check(run(wrapper, problem))

    def test_longer_offsets_in_cuda_graph_buffers(self, device: str) -> None:
        """The buffers of a CUDA graph wrapper may be longer, too."""
        problem = SOME.build(device)
        sizes = {"qo_indptr": 9, "kv_indptr": 6, "kv_indices": 99, "kv_len_arr": 4}
        buffers: dict[str, Any] = {
            name: torch.zeros(size, dtype=torch.int32, device=device)
            for name, size in sizes.items()
        }
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
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
