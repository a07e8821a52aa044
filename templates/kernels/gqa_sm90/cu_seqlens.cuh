// Validation of cu_seqlens_q: a sequence must not end before it begins. Then no two sequences share
// query tokens, and the host can bound the total work.

#pragma once

#include "common/params.cuh"

__device__ inline bool has_negative_q_len(const Params& params, int seq_idx) {
  const int* offsets = params.cu_seqlens_q;
  return offsets != nullptr && offsets[seq_idx + 1] < offsets[seq_idx];
}
