// Tokens that are hidden from rows for another reason than their position: entries of a list
// that name no token, and a bias of minus infinity.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "work_tile.cuh"

// The numbers that are added to the scores of `row`; null if there are none.
__device__ inline const float* row_bias(const Params& params, const Work& work, int row) {
  if constexpr (!kHasBias) return nullptr;
  const int packed_row = work.first_row + row;
  const i64 query = work.first_query + packed_row / work.heads;
  return params.bias + query * params.bias_stride +
         packed_row % work.heads * params.bias_head_stride;
}

// Returns whether a row sees a token that it is not too early for, and adds the token's bias to the
// score. Leaves word of what is hidden by a bias.
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
    // A finite number stays finite: minus infinity is for what is hidden, and infinity makes NaN.
    const float in_log2 = added * kLog2E;
    const bool overflows = fabsf(in_log2) == kInfinity && added != kInfinity;
    score += overflows ? copysignf(kFloatMax, added) : in_log2;
  }
  return true;
}

// Before a tile: which entries of the list name no token, and that no row has hidden any yet.
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
