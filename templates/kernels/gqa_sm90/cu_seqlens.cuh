// Whether the query tokens of a request end before they begin. Where none do, requests share no
// tokens, and the host knows how much work there is at the most.

#pragma once

#include "common/params.cuh"

__device__ inline bool goes_back(const Params& params, int request) {
  const int* offsets = params.cu_seqlens_q;
  return offsets != nullptr && offsets[request + 1] < offsets[request];
}
