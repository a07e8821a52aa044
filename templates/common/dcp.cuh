// Causal mask by global positions in decode context parallel (DCP): token k of this rank's KV cache
// is token cp_world * k + cp_rank of the sequence.

#pragma once

#include "common/types.cuh"

// End of this rank's tokens that query token `token` of a sequence attends to; lengths are
// untrusted. A template: without DCP, Params lacks these parameters.
template <typename DcpParams>
__device__ inline int dcp_kv_end(const DcpParams& params, int seq_idx, int kv_len, int q_len,
                                 int token) {
  const i64 pos = static_cast<i64>(params.causal_seqlens_kv_global[seq_idx]) - q_len + token;
  if (pos < params.cp_rank) return 0;
  const u32 last = static_cast<u32>(pos - params.cp_rank) / static_cast<u32>(params.cp_world);
  return static_cast<int>(min(last + 1, static_cast<u32>(kv_len)));
}
