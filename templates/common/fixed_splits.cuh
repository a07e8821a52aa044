// Fixed splits of batch-invariant kernels: the KV tokens of a sequence are cut at multiples of a
// number of tokens from its first one on, which follows from the sequence alone, so that no sum
// depends on the rest of the batch.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

struct FixedSplit {
  int num_splits;  // of the sequence, at least one
  int first_token;
  int end_token;
};

// Splits that the tokens from `kv_begin` to `kv_end` lie in. A tile beyond the largest length still
// fits in an int, so nothing wraps around.
__device__ inline int splits_of(int kv_begin, int kv_end, u32 tokens) {
  return static_cast<int>((kv_end + tokens - 1) / tokens - kv_begin / tokens);
}

// Split `split_idx` of the tokens from `kv_begin` to `kv_end`: of kSplitTokens, or of twice as many
// until there are at most kMaxSplits. The host has workspace for `max_splits`; the last of them
// takes the tokens beyond the length that the host knows of.
__device__ inline FixedSplit fixed_split_of(int kv_begin, int kv_end, int split_idx,
                                            int max_splits) {
  u32 tokens = kSplitTokens;
  while (splits_of(kv_begin, kv_end, tokens) > kMaxSplits) tokens *= 2;
  const int num_splits = max(1, min(splits_of(kv_begin, kv_end, tokens), max_splits));
  const u32 first_token = (static_cast<u32>(kv_begin) / tokens + split_idx) * tokens;
  const bool is_last = split_idx + 1 >= num_splits;
  return {num_splits, static_cast<int>(first_token),
          is_last ? kv_end : static_cast<int>(first_token + tokens)};
}

// Splits of the sequence of a work item; another kernel combines more than one.
template <typename Work>
__device__ inline int num_splits_of(const Params& params, const Work& work) {
  if constexpr (kBatchInvariant) return work.fixed_split(params).num_splits;
  return params.num_splits;
}

// Stores the splits of the rows of a CTA for the combine kernel, if there is one: it skips rows of
// one split. A template: Params of other kernels lacks the parameter.
template <typename InvariantParams, typename RowOf>
__device__ inline void store_row_splits(const InvariantParams& params, int rows, int num_splits,
                                        RowOf global_row) {
  if (params.num_splits == 1) return;
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += kThreads) {
    params.row_splits[global_row(row)] = num_splits;
  }
}
