// Sixteen elements of a token, those of a lane: loaded as fp32, and stored as bf16.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"

constexpr u32 kMagnitude = 0x7fffffff;
constexpr u32 kInfinityBits = 0x7f800000;

// The lanes behind those of the codes have the bf16 elements, or the first ones: fewer than
// kRestLanes.
__device__ inline int rest_lane_index() {
  return (lane_index() + kWarpLanes - kScaledLanes) % kWarpLanes;
}

__device__ inline void load_elements(const unsigned char* source, float (&values)[kLaneElements]) {
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    const Chunk loaded = reinterpret_cast<const Chunk*>(source)[chunk];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u16 bits = static_cast<u16>(loaded.words[i / 2] >> (i % 2 * 16));
      values[chunk * 8 + i] = cvt_f32(Element{}, bits);
    }
  }
}

// A number in bf16; every NaN is the same.
__device__ inline u32 bf16_of_f32(float value) {
  const u32 bits = __float_as_uint(value);
  if ((bits & kMagnitude) > kInfinityBits) return 0x7fc0;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// `scale` divides elements that readers multiply by it.
__device__ inline void store_bf16(unsigned char* target, const float (&values)[kLaneElements],
                                  float scale) {
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
