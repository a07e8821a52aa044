"""FlashInfer compatibility on the CPU: signatures and semantics."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest

import mlagen
from tests.drop_in_semantics import DropInSemantics

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

mla.xqa_batch_decode_with_kv_cache_mla
query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables
seq_lens max_seq_len
out=None bmm1_scale=1.0 bmm2_scale=1.0 sinks=None enable_pdl=None

decode.xqa_batch_decode_with_kv_cache
query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 bmm2_scale=1.0
window_left=-1 out=None sinks=None kv_layout='NHD' enable_pdl=None q_len_per_req=1 o_scale=1.0
mask=None kv_cache_sf=None q_cu_seq_lens=None
* lse=None return_lse=False return_lse_base='base2' causal=True

decode.trtllm_batch_decode_with_kv_cache
query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale=1.0 bmm2_scale=1.0
window_left=-1 out=None out_dtype=None o_sf_scale=None o_sf_vec_size=None sinks=None
kv_layout='HND' enable_pdl=None backend='auto' q_len_per_req=1 o_scale=1.0 mask=None max_q_len=None
cum_seq_lens_q=None skip_softmax_threshold_scale_factor=None kv_cache_sf=None
uses_shared_paged_kv_idx=True lse=None return_lse=False bmm1_scale_log2=None
multi_ctas_kv_counter_buffer=None enable_block_sparse_attention=False cp_world=1 cp_rank=0
causal_seqlens_kv_global=None bf16q_fp8kv_transform_mode=None request_order=None
request_order_plan=None

decode.BatchDecodeWithPagedKVCacheWrapper.__init__
self float_workspace_buffer kv_layout='NHD' use_cuda_graph=False use_tensor_cores=False
paged_kv_indptr_buffer=None paged_kv_indices_buffer=None paged_kv_last_page_len_buffer=None
backend='auto' jit_args=None

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

xqa.xqa
q k_cache v_cache page_table seq_lens output workspace_buffer semaphores num_kv_heads
page_size sinks=None q_scale=1.0 kv_scale=1.0 sliding_win_size=0 kv_layout='NHD' sm_count=None
enable_pdl=None rcp_out_scale=1.0 q_seq_len=1 mask=None
* q_cu_seq_lens=None k_sf_cache=None v_sf_cache=None lse=None lse_base='base2' causal=True

xqa.xqa_mla
q k_cache v_cache page_table seq_lens output workspace_buffer semaphores page_size
q_scale=1.0 kv_scale=1.0 sm_count=None enable_pdl=None

mla.BatchMLAPagedAttentionWrapper.__init__
self float_workspace_buffer use_cuda_graph=False qo_indptr=None kv_indptr=None kv_indices=None
kv_len_arr=None backend='auto'

mla.BatchMLAPagedAttentionWrapper.plan
self qo_indptr=None kv_indptr=None kv_indices=None kv_len_arr=None num_heads=None head_dim_ckv=None
head_dim_kpe=None page_size=None causal=None sm_scale=None q_data_type=None kv_data_type=None
use_profiler=False
* metadata=None cum_seq_lens_q=None block_tables=None seq_lens=None max_q_len=None query_layout=None
kv_cache_layout=None lse_mode='none' output_dtype=None output_scale='none' scale_mode='default'
skip_softmax=False enable_pdl=None use_sinks=False

mla.BatchMLAPagedAttentionWrapper.run
self q_nope=None q_pe=None ckv_cache=None kpe_cache=None out=None lse=None return_lse=False
profiler_buffer=None kv_len=None page_table=None return_lse_base_on_e=False o_scale=None
* query=None kv_cache=None ckv_scale=None ckv_scale_arr=None kpe_scale=None sinks=None
skip_softmax_threshold_scale_factor=None bmm1_scale=None bmm2_scale=None

mla.flare_mla_decoding
q k mask valid_length scale
* output=None ragged=False num_partitions=None q_scale=None per_token_scale_rope_aware=False
kv_scales=None
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


class TestOnTheCpu(DropInSemantics):
    """Semantics of the compatible calls, without a GPU."""

    device = "cpu"
