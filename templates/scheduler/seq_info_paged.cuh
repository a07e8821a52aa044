// KV length of a sequence whose pages a block table lists.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "config.cuh"

__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  return params.seq_lens[seq_idx];
}

// `seq_len` is seq_len_of(seq_idx). The same clamp as clamp_kv_len, in fewer instructions.
__device__ inline int kv_len_of(const Params& params, int seq_idx, int seq_len) {
  const int num_pages = min(block_table_row(params, seq_idx).num_pages, kMaxKvLen / kPageSize);
  return max(0, min(seq_len, num_pages * kPageSize));
}
