// Sequences of a call: their query rows, and the KV blocks that these attend to.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, query head of a kv head) pair of a sequence, query token first.
struct SeqInfo {
  int first_query;  // index of the sequence's first query token among all
  int q_len;
  int kv_len;  // tokens in the cache, the new ones included
  int m_tiles;  // of one kv head; 0 if cu_seqlens_q points outside the query tensor
  int num_tiles;  // work tiles: one M tile of kKvHeadsPerCta kv heads for each CTA of a group
  int unit_tokens;  // of a unit of the schedule: a KV block, or a fixed split
  int first_kv_block;  // unit that any row attends to
  int num_kv_blocks;  // from first_kv_block on
};

// Tokens of the fixed splits of a sequence whose rows attend to `tokens`: by these alone, so that
// no other sequence has an influence.
__device__ inline int split_tokens_of(int tokens) {
  constexpr int kMaxTokens = kMaxSplits * kSplitTokens;
  return kSplitTokens << 32 - __clz(max(tokens - 1, 0) / max(kMaxTokens, 1));
}

// First token in the sliding window of a query token.
__device__ inline int window_kv_begin(const Params& params, int kv_len, int q_len, int query) {
  return max(0, max(0, kv_len - q_len + query + 1) - params.window);
}

// Sets the KV blocks that any row attends to.
__device__ inline void set_kv_blocks(const Params& params, SeqInfo& seq_info, int seq_len) {
  seq_info.kv_len = min(max(seq_len, 0), params.max_tokens);
  const int kv_begin = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, 0);
  seq_info.unit_tokens = kBlockN;
  if constexpr (kBatchInvariant) seq_info.unit_tokens = split_tokens_of(seq_info.kv_len - kv_begin);
  seq_info.first_kv_block = kv_begin / seq_info.unit_tokens;
  seq_info.num_kv_blocks =
      ceil_div(seq_info.kv_len, seq_info.unit_tokens) - seq_info.first_kv_block;
}

// Length of a sequence, unchecked. A sparse call has the same for all: that of its indices.
__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  return kIsSparse ? params.max_tokens : params.seq_lens[seq_idx];
}

// `seq_len` is the unchecked entry of seq_lens.
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = params.q_len;
  seq_info.m_tiles = params.m_tiles;
  seq_info.num_tiles = params.num_tiles;
  seq_info.first_query = seq_idx * params.q_len;
  if (params.cu_seqlens_q != nullptr) {
    const int first = params.cu_seqlens_q[seq_idx];
    const int end = params.cu_seqlens_q[seq_idx + 1];
    const bool is_inside = first >= 0 && first <= end && end <= params.tokens;
    seq_info.first_query = first;
    seq_info.q_len = is_inside ? end - first : 0;
    seq_info.m_tiles = ceil_div(seq_info.q_len * params.group_size, kBlockM);
    seq_info.num_tiles = seq_info.m_tiles * params.num_tiles;  // params.num_tiles is per M tile
  }
  set_kv_blocks(params, seq_info, seq_len);
  return seq_info;
}

__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx) {
  return seq_info_of(params, seq_idx, seq_len_of(params, seq_idx));
}

// A sequence must not end before it begins. Then no two sequences share query tokens, and the host
// can bound the total work.
__device__ inline bool has_negative_q_len(const Params& params, int seq_idx) {
  const int* offsets = params.cu_seqlens_q;
  return offsets != nullptr && offsets[seq_idx + 1] < offsets[seq_idx];
}
