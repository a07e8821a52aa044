// Sequence lengths of sparse calls: every query token is a sequence of its own, and its length is
// its `topk_length`.

#pragma once

#include "common/params.cuh"
#include "common/ragged_tiles.cuh"

__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  const TopkIndices topk_indices{
      params.seq_lens,        params.topk_length,  params.sparse_cu_seqlens_q,
      params.sparse_num_seqs, params.sparse_q_len, params.topk};
  return topk_length_of(topk_indices, seq_idx);
}

__device__ inline int kv_len_of(const Params&, int, int seq_len) { return seq_len; }
