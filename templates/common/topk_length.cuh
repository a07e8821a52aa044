// Sparse attention: the number of valid top-k indices of a query token.

#pragma once

#include "common/ragged_tiles.cuh"
#include "common/types.cuh"

// `topk_length` holds the numbers, or they follow from the causal KV length of each query token.
struct TopkIndices {
  const int* seq_lens;
  const int* topk_length;
  const int* cu_seqlens_q;
  int num_seqs;
  int q_len;
  int topk;
};

__device__ inline int topk_length_of(const TopkIndices& topk_indices, int token) {
  i64 length;
  if (topk_indices.topk_length != nullptr) {
    length = topk_indices.topk_length[token];
  } else {
    int seq_idx;
    i64 end;  // of its query tokens
    if (topk_indices.cu_seqlens_q == nullptr) {
      seq_idx = token;
      if (topk_indices.q_len > 1)
        seq_idx = static_cast<int>(static_cast<u32>(token) / topk_indices.q_len);
      end = static_cast<i64>(seq_idx + 1) * topk_indices.q_len;
    } else {
      seq_idx = seq_of_token(topk_indices.cu_seqlens_q, topk_indices.num_seqs, token);
      end = topk_indices.cu_seqlens_q[seq_idx + 1];
    }
    length = topk_indices.seq_lens[seq_idx] - end + token + 1;
  }
  return static_cast<int>(
      max(static_cast<i64>(0), min(length, static_cast<i64>(topk_indices.topk))));
}
