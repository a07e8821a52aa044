// How many tokens a request has, where every query token has a list of its own and counts as a
// request.

#pragma once

#include "common/params.cuh"
#include "common/topk_length.cuh"

__device__ inline int length_of(const Params& params, int request) {
  const TokenLists lists{params.seq_lens,        params.topk_length,  params.sparse_cu_seqlens_q,
                         params.sparse_num_seqs, params.sparse_q_len, params.topk};
  return listed_tokens(lists, request);
}

__device__ inline int tokens_of(const Params&, int, int length) { return length; }
