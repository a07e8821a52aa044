// Causal mask by global positions in decode context parallel (DCP): token k of this rank's KV cache
// is token cp_world * k + cp_rank of the sequence.

#pragma once

#include "common/types.cuh"

// End of this rank's tokens that query token `token` of a sequence attends to, at most `kv_len`. A
// template: without DCP, Params lacks these parameters.
template <typename DcpParams>
__device__ inline int dcp_kv_end(const DcpParams& params, int seq_idx, int kv_len, int q_len,
                                 int token) {
  // No overflow: lengths below zero have no tokens, and `token` is less than `q_len`.
  const int pos = max(params.causal_seqlens_kv_global[seq_idx], 0) - (q_len - token);
  if (pos < params.cp_rank) return 0;
  const u32 last = static_cast<u32>(pos - params.cp_rank) / static_cast<u32>(params.cp_world);
  return static_cast<int>(min(last + 1, static_cast<u32>(kv_len)));
}
