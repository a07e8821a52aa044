// Writes a token into its slot, unless an earlier token has the same.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "entry.cuh"
#include "store_token.cuh"
#include "token.cuh"

struct SharedMemoryPlan {
  u32 repeated[kWarps];  // found by each warp: a bit for each token of the CTA
};

// Whether no token before the warp's has the same entry: the first one counts. All threads of the
// CTA compare an entry each with those of all its tokens, so each entry is loaded once for them.
__device__ inline bool is_first(const Params& params, SharedMemoryPlan& smem) {
  if (is_in_order(params)) return true;
  const int first = static_cast<int>(blockIdx.x) * kWarps;
  i64 entries[kWarps];
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    entries[warp] = first + warp < params.num_tokens ? entry_of(params, first + warp) : -1;
  }
  const int end = first + kWarps < params.num_tokens ? first + kWarps : params.num_tokens;
  u32 repeated = 0;
#pragma unroll 2
  for (int other = static_cast<int>(threadIdx.x); other < end; other += kThreads) {
    const i64 entry = entry_of(params, other);
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const bool is_same = entry == entries[warp] && other < first + warp;
      repeated |= (is_same ? 1u : 0u) << warp;
    }
  }
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    repeated |= __shfl_xor_sync(~0u, repeated, lanes);
  }
  if (lane_index() == 0) smem.repeated[warp_index()] = repeated;
  __syncthreads();
  u32 of_all = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) of_all |= smem.repeated[warp];
  return (of_all >> warp_index() & 1) == 0;
}

// The warp's token.
__device__ inline void write_token(const Params& params, SharedMemoryPlan& smem) {
  const int index = static_cast<int>(blockIdx.x) * kWarps + warp_index();
  const bool exists = index < params.num_tokens;
  const int lane = lane_index();
  Token token;
  // Loads do not wait for the slot.
  if (exists) load_token(params, index, token);
  if (!is_first(params, smem) || !exists) return;
  const i64 entry = entry_of(params, index);
  if (entry < 0 || entry >= params.num_entries) return;
  const int page = static_cast<int>(entry) / params.rows_per_page;
  const int slot = static_cast<int>(entry) % params.rows_per_page;
  if (slot >= params.page_size) return;
  store_token(params, index, token, page, slot, lane);
}
