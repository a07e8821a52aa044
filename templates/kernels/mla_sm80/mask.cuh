// Masks beyond causality: invalid top-k indices, and a bias of minus infinity.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "work_tile.cuh"

// Bias of `row`; null if there is none.
__device__ inline const float* row_bias(const Params& params, const Work& work, int row) {
  if constexpr (!kHasBias) return nullptr;
  const int packed_row = work.first_row + row;
  const i64 query = work.first_query + packed_row / work.heads;
  return params.bias + query * params.bias_stride +
         packed_row % work.heads * params.bias_head_stride;
}

// Returns whether a row attends to a token within its KV limit, and adds the token's bias to the
// score. Records tokens that a bias masks.
__device__ inline bool attends_token(const float* bias, int first_token, int token, float& score,
                                     SharedMemoryPlan& smem) {
  if constexpr (kIsSparse) {
    return smem.is_masked[token] == 0;
  } else if constexpr (kHasBias) {
    const float added = bias[first_token + token];
    if (added == -kInfinity) {
      smem.is_masked[token] = 1;  // all who write it write the same
      return false;
    }
    // A finite score stays finite: minus infinity means masked, and plus infinity makes NaN.
    const float in_log2 = added * kLog2E;
    const bool overflows = fabsf(in_log2) == kInfinity && added != kInfinity;
    score += overflows ? copysignf(kFloatMax, added) : in_log2;
  }
  return true;
}

// Called before a tile: marks invalid top-k indices, and clears what the bias masked.
__device__ inline void begin_kv_block(const Params& params, const int* topk_indices,
                                      int topk_length, int kv_block, SharedMemoryPlan& smem) {
  const int token = static_cast<int>(threadIdx.x);
  if (!(kIsSparse || kHasBias) || token >= kBlockN) return;
  bool is_masked = false;
  if constexpr (kIsSparse) {
    const int token_idx = kv_block * kBlockN + token;
    const int id = token_idx < topk_length ? topk_indices[token_idx] : -1;
    is_masked = id < 0 || !is_valid_page(id / kPageSize, params.num_pages);
  }
  smem.is_masked[token] = is_masked;
}
