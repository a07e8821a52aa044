// Decode context parallel (DCP): token k of a rank is token cp_world * k + cp_rank of the sequence,
// and the causal mask is by positions in the sequence. Templates: without DCP, Params lacks the
// parameters.

#pragma once

#include "common/types.cuh"

// End of the rank's tokens that a query token at position `pos` attends to, at most `kv_len`.
template <typename DcpParams, typename Position>
__device__ inline int dcp_kv_end_at(const DcpParams& params, Position pos, int kv_len) {
  if (pos < params.cp_rank) return 0;
  const u32 last = static_cast<u32>(pos - params.cp_rank) / static_cast<u32>(params.cp_world);
  return static_cast<int>(min(last + 1, static_cast<u32>(kv_len)));
}

// The same of query token `query` of a sequence: before its first one, all ranks have
// `causal_seqlens_kv_global` tokens.
template <typename DcpParams>
__device__ inline int dcp_kv_end_of_query(const DcpParams& params, int seq_idx, int query,
                                          int kv_len) {
  const i64 first = params.causal_seqlens_kv_global[seq_idx];
  return dcp_kv_end_at(params, first + query, kv_len);
}

// First query token of the sequence that attends to the rank's token `token`; may be past the last.
template <typename DcpParams>
__device__ inline i64 dcp_first_query(const DcpParams& params, int seq_idx, int token) {
  const i64 pos = static_cast<i64>(token) * params.cp_world + params.cp_rank;
  return max(pos - params.causal_seqlens_kv_global[seq_idx], static_cast<i64>(0));
}
