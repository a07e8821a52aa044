// Tokens of a sequence in the KV cache: its row of the block table, the mask of invalid top-k
// indices, and the causal mask of a rank in decode context parallel (DCP).

#pragma once

#include "common/dcp.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Mask of the invalid top-k indices of a KV block (FlashMLA's `is_kv_valid`, inverted).
struct alignas(8) InvalidMask {
  u16 bits[4];  // 16 tokens each

  __device__ u64 all() const { return *reinterpret_cast<const u64*>(bits); }
};

struct BlockTableRow {
  i64 start;
  int num_pages;
};

// Clamps `kv_indptr` to the table, so that invalid offsets cannot fault.
__device__ inline BlockTableRow block_table_row(const Params& params, int seq_idx) {
  if (kIsSparse || params.kv_indptr == nullptr) {
    return {seq_idx * static_cast<i64>(params.block_tables_stride), params.max_pages};
  }
  const int start = max(0, min(params.kv_indptr[seq_idx], params.max_pages));
  const int end = max(start, min(params.kv_indptr[seq_idx + 1], params.max_pages));
  return {start, end - start};
}

// End of this rank's tokens that query token `token` of a sequence attends to, at most `kv_len`. A
// template: without DCP, Params lacks the lengths.
template <typename DcpParams>
__device__ inline int dcp_kv_end(const DcpParams& params, int seq_idx, int kv_len, int q_len,
                                 int token) {
  // No overflow: lengths below zero have no tokens, and `token` is less than `q_len`.
  const int pos = max(params.causal_seqlens_kv_global[seq_idx], 0) - (q_len - token);
  return dcp_kv_end_at(params, pos, kv_len);
}
