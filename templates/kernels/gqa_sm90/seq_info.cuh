// Sequences of a call: their query rows, and the KV blocks that these attend to.

#pragma once

#include "common/params.cuh"
#include "common/sparse_blocks.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, query head of a kv head) pair of a sequence, query token first.
struct SeqInfo {
  int first_query;  // index of the sequence's first query token among all
  int q_len;
  int kv_len;  // tokens in the cache, the new ones included
  int m_tiles;  // of one kv head; 0 if cu_seqlens_q points outside the query tensor
  int num_tiles;  // work tiles: one M tile of kKvHeadsPerCta kv heads for each CTA of a group
  int first_kv_block;  // that any row attends to
  int num_kv_blocks;  // from first_kv_block on; of batch-invariant kernels, their fixed splits
  int blocks_to_split;  // of these kernels, the KV blocks
};

constexpr int kMinSplitBlocks = kSplitTokens / kBlockN;

// Fixed splits of KV blocks, by their number alone, so that no other sequence has an influence: a
// power of two, so that the CTA groups of a GPU share the splits of one sequence about evenly.
// Those of a sparse call are equally long, because the width of its indices must have none either.
__device__ inline int num_fixed_splits(int kv_blocks) {
  if constexpr (!kBatchInvariant) return kv_blocks;
  if (kv_blocks <= 0) return 0;
  if constexpr (kIsSparse) return min(ceil_div(kv_blocks, kMinSplitBlocks), kMaxSplits);
  return min(1 << 31 - __clz(max(kv_blocks / kMinSplitBlocks, 1)), kMaxSplits);
}

// First KV block of fixed split `split`, from the first one of the sequence on.
__device__ inline int fixed_split_begin(const SeqInfo& seq_info, int split) {
  const int num_splits = max(seq_info.num_kv_blocks, 1);
  if (kIsSparse && split < num_splits) return split * kMinSplitBlocks;
  const i64 scaled = static_cast<i64>(seq_info.blocks_to_split) * split;
  return kIsSparse ? seq_info.blocks_to_split : static_cast<int>(scaled >> 31 - __clz(num_splits));
}

// First token in the sliding window of a query token.
__device__ inline int window_kv_begin(const Params& params, int kv_len, int q_len, int query) {
  if constexpr (kIsSparse) return 0;
  return max(0, max(0, kv_len - q_len + query + 1) - params.window);
}

// Sets the KV blocks that any row attends to.
__device__ inline void set_kv_blocks(const Params& params, SeqInfo& seq_info, int seq_len) {
  seq_info.kv_len = min(max(seq_len, 0), params.max_tokens);
  seq_info.first_kv_block = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, 0) / kBlockN;
  const int tokens = kTailTokens == 0 ? seq_info.kv_len : max(seq_info.kv_len - kTailTokens, 0);
  seq_info.num_kv_blocks = ceil_div(tokens, kBlockN) - seq_info.first_kv_block;
  if constexpr (kBatchInvariant) {
    seq_info.blocks_to_split = seq_info.num_kv_blocks;
    seq_info.num_kv_blocks = num_fixed_splits(seq_info.blocks_to_split);
  }
}

// Length of a sequence, unchecked, by `load`. Gathered, its tokens are as many as indices count;
// blocks that indices name are as many as indices. A template: Params of a dense kernel lacks them.
template <typename AnyParams, typename Load>
__device__ inline int load_seq_len(const AnyParams& params, int seq_idx, Load load) {
  if constexpr (kUsesTma) {
    return kHasEqualSeqs ? params.max_tokens : load(params.seq_lens + seq_idx);
  } else {
    return load_num_indices(params, seq_idx, load);
  }
}

__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  return load_seq_len(params, seq_idx, [](const int* seq_len) { return *seq_len; });
}

// Whether sequences have query tokens of their own number; those of a sparse call have one.
__device__ inline bool has_ragged_queries(const Params& params) {
  return !kIsSparse && params.cu_seqlens_q != nullptr;
}

// `seq_len` is the unchecked entry of seq_lens.
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = kIsSparse ? 1 : params.q_len;
  seq_info.m_tiles = params.m_tiles;
  seq_info.num_tiles = params.num_tiles;
  seq_info.first_query = seq_idx * seq_info.q_len;
  if (has_ragged_queries(params)) {
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
