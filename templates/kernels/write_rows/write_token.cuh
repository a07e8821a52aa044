// Writes a token into its slot: codes, scales and bf16 elements, by the format of a row.

#pragma once

#include "common/packed_row.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "quantize.cuh"
#include "token.cuh"

// Where a token is written. Without a slot mapping tokens are in the order of whole pages.
__device__ inline i64 entry_of(const Params& params, int token) {
  if (params.slot_mapping == nullptr) return token;
  return params.has_wide_slots != 0 ? reinterpret_cast<const i64*>(params.slot_mapping)[token]
                                    : reinterpret_cast<const int*>(params.slot_mapping)[token];
}

struct SharedMemoryPlan {
  u32 repeated[kWarps];  // found by each warp: a bit for each token of the CTA
};

// Whether no token before the warp's has the same entry: the first one counts. All threads of the
// CTA compare an entry each with those of all its tokens, so each entry is loaded once for them.
__device__ inline bool is_first(const Params& params, SharedMemoryPlan& smem) {
  if (params.slot_mapping == nullptr) return true;
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

// One byte, or an fp32, of each group; the bytes of padding behind them are zero.
__device__ inline void write_scales(unsigned char* target, const GroupScale& group) {
  constexpr bool kIsFp32 = kIsSame<KvRow::ScaleCode, Fp32>;
  const int index = lane_index() / kGroupLanes;
  if (lane_index() % kGroupLanes == 0 && index < KvRow::kScales) {
    if constexpr (kIsFp32) {
      reinterpret_cast<u32*>(target)[index] = group.stored;
    } else {
      target[index] = static_cast<unsigned char>(group.stored);
    }
  }
  constexpr int kUsed = KvRow::kScales * (kIsFp32 ? 4 : 1);
  const int padding = kUsed + lane_index();
  if (padding < KvRow::kScaleBytes) target[padding] = 0;
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

  unsigned char* page_bytes = params.cache + page * params.page_stride;
  unsigned char* row = page_bytes + slot * params.token_stride;
  const GroupScale group = scale_of(token.scaled);
  if (lane < kScaledLanes) {
    unsigned char* codes = row + lane * kLaneElements * KvRow::kCodeBits / 8;
    store_codes(KvRow::Code{}, codes, token.scaled, group);
  }
  if constexpr (KvRow::kHasInlineScales) {
    write_scales(row + KvRow::kCodeBytes, group);
  } else if constexpr (KvRow::kHasScaleRows) {
    write_scales(page_bytes + params.scale_rows_offset + slot * KvRow::kScaleBytes, group);
  } else if (lane == 0) {
    params.scales[page * params.scale_page_stride + slot * params.scale_token_stride] = group.value;
  }
  if (rest_lane_index() < kRestLanes) {
    const int offset = rest_lane_index() * kLaneElements * 2;
    store_rest(params, index, token, row + KvRow::kBf16Offset + offset, group.value);
  }
}
