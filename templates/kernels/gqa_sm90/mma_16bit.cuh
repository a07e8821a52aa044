// Operands of the QK and PV GEMMs, over a KV cache in 16 bits.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/cvt.cuh"

// A 16-bit KV cache needs no conversion.

// Loads a lane's fragment of the 16 dims `k` of Q, in the k order of its K fragment.
__device__ inline uint2 load_q_fragment(const u16* row, int k) {
  const u32* pairs = reinterpret_cast<const u32*>(row + k * 16) + lane_index() % 4;
  return make_uint2(pairs[0], pairs[4]);
}

using KeyScales = NoBlockScales;
using ValueScales = NoBlockScales;
constexpr float kDequantFactor = 1.0f;

// ldmatrix loads one A fragment, of K or of V.
constexpr int kFragmentsPerLoad = 1;
__device__ inline void k_fragment(const u32 (&loaded)[4], int, const KeyScales&, int, u32 (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = loaded[i];
}
__device__ inline void v_fragment(const u32 (&loaded)[4], int, const ValueScales& scales, int,
                                  u32 (&a)[4]) {
  k_fragment(loaded, 0, scales, 0, a);
}

// Dim of accumulators `half * 2` and `half * 2 + 1` of a 16-dim tile.
__device__ inline int dim_of_lane(int tile, int half) {
  return tile * 16 + half * 8 + lane_index() / 4;
}

// Zeroes NaN and Inf in a chunk.
__device__ inline Chunk zero_nonfinite(Chunk chunk) {
  constexpr u32 kExponent = kIsSame<Element, Fp16> ? 0x7c00 : 0x7f80;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    u32& pair = chunk.words[word];
    if ((pair & kExponent) == kExponent) pair &= 0xffff0000;
    if ((pair >> 16 & kExponent) == kExponent) pair &= 0xffff;
  }
  return chunk;
}

// Element of a cached V row.
__device__ inline float element_at(const unsigned char* row, int dim) {
  return cvt_f32(Element{}, reinterpret_cast<const u16*>(row)[dim]);
}

// Stores a warp's accumulators of eight rows and kDims dims to rows of a combine buffer, from
// `first_column` on.
template <int kDims, int kPitch>
__device__ inline void store_to_combine_buffer(const Output& output, int group, int first_tile,
                                               int first_column,
                                               float (&combine_buffer)[8][kPitch]) {
#pragma unroll
  for (int tile = 0; tile < kDims / 16; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      combine_buffer[row_of(0, e % 2)][first_column + dim_of_lane(tile, e / 2)] =
          output[first_tile + tile][group][e];
    }
  }
}
