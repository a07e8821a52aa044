// Writes a token into its slot: codes, scales and bf16 elements, by the format of a row.

#pragma once

#include "common/packed_row.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "quantize.cuh"

// Where a token is written. Without a slot mapping tokens are in the order of whole pages.
__device__ inline i64 entry_of(const Params& params, int token) {
  if (params.slot_mapping == nullptr) return token;
  return params.has_wide_slots != 0 ? reinterpret_cast<const i64*>(params.slot_mapping)[token]
                                    : reinterpret_cast<const int*>(params.slot_mapping)[token];
}

// Whether no token before has the same entry: the first one counts.
__device__ inline bool is_first(const Params& params, int token, i64 entry) {
  if (params.slot_mapping == nullptr) return true;
  bool is_repeated = false;
#pragma unroll 4
  for (int others = 0; others < token; others += kWarpLanes) {
    const int other = others + lane_index();
    if (other < token) is_repeated |= entry_of(params, other) == entry;
  }
  return !__any_sync(~0u, is_repeated);
}

// A number in bf16; every NaN is the same.
__device__ inline u32 bf16_of_f32(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & kMagnitude) > kInfinityBits) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Sixteen of the elements that are bf16 in a row; `scale` divides them if it multiplies them later.
__device__ inline void write_rest(const unsigned char* source, unsigned char* target, float scale) {
  if constexpr (kIsSame<Element, Bf16> && !KvRow::kScalesBf16) {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      reinterpret_cast<Chunk*>(target)[chunk] = reinterpret_cast<const Chunk*>(source)[chunk];
    }
  } else {
    float values[kLaneElements];
    load_elements(source, values);
    Chunk chunks[2];
#pragma unroll
    for (int i = 0; i < kLaneElements; i += 2) {
      const float low = KvRow::kScalesBf16 ? values[i] / scale : values[i];
      const float high = KvRow::kScalesBf16 ? values[i + 1] / scale : values[i + 1];
      chunks[i / 8].words[i % 8 / 2] = bf16_of_f32(low) | bf16_of_f32(high) << 16;
    }
    reinterpret_cast<Chunk*>(target)[0] = chunks[0];
    reinterpret_cast<Chunk*>(target)[1] = chunks[1];
  }
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
__device__ inline void write_token(const Params& params) {
  const int token = static_cast<int>(blockIdx.x) * kWarps + warp_index();
  if (token >= params.num_tokens) return;
  const int lane = lane_index();
  float values[kLaneElements] = {};
  // Loads do not wait for the slot.
  if (lane < kScaledLanes) {
    load_elements(params.scaled + token * params.scaled_stride + lane * kLaneElements * 2, values);
  }
  const i64 entry = entry_of(params, token);
  if (entry < 0 || entry >= params.num_entries) return;
  const int page = static_cast<int>(entry) / params.rows_per_page;
  const int slot = static_cast<int>(entry) % params.rows_per_page;
  if (slot >= params.page_size || !is_first(params, token, entry)) return;

  unsigned char* page_bytes = params.cache + page * params.page_stride;
  unsigned char* row = page_bytes + slot * params.token_stride;
  const GroupScale group = scale_of(values);
  if (lane < kScaledLanes) {
    store_codes(KvRow::Code{}, row + lane * kLaneElements * KvRow::kCodeBits / 8, values, group);
  }
  if constexpr (KvRow::kHasInlineScales) {
    write_scales(row + KvRow::kCodeBytes, group);
  } else if constexpr (KvRow::kHasScaleRows) {
    write_scales(page_bytes + params.scale_rows_offset + slot * KvRow::kScaleBytes, group);
  } else if (lane == 0) {
    params.scales[page * params.scale_page_stride + slot * params.scale_token_stride] = group.value;
  }
  // The lanes behind those of the codes, or the first ones.
  const int rest_lane = (lane + kWarpLanes - kScaledLanes) % kWarpLanes;
  if (rest_lane < kRestLanes) {
    const int offset = rest_lane * kLaneElements * 2;
    const unsigned char* rest = params.rest + token * params.rest_stride;
    write_rest(rest + offset, row + KvRow::kBf16Offset + offset, group.value);
  }
}
