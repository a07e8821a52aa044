// How many tokens a request has, where tables lead to its pages.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "config.cuh"

__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  return params.seq_lens[seq_idx];
}

// `seq_len` is what seq_len_of has for it. As clamp_kv_len says, in fewer instructions.
__device__ inline int kv_len_of(const Params& params, int seq_idx, int seq_len) {
  const int num_pages = min(block_table_row(params, seq_idx).num_pages, kMaxKvLen / kPageSize);
  return max(0, min(seq_len, num_pages * kPageSize));
}
