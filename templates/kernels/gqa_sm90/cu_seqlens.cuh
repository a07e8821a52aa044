// Whether the query tokens of a request end before they begin. Where none do, requests share no
// tokens, and the host knows how much work there is at the most.

#pragma once

#include "common/params.cuh"

__device__ inline bool has_negative_q_len(const Params& params, int seq_idx) {
  const int* offsets = params.cu_seqlens_q;
  return offsets != nullptr && offsets[seq_idx + 1] < offsets[seq_idx];
}
