// Operands of the QK and PV GEMMs, over a KV cache of 8 bits: e4m3, e5m2 or int8.

#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"

// Elements are converted to fp16 in registers, which is exact.

// Loads a lane's fragment of the 16 dims `k` of Q, in the k order of its K fragment:
// four adjacent bytes of every 16.
__device__ inline uint2 load_q_fragment(const u16* row, int k) {
  return reinterpret_cast<const uint2*>(row + k * 16)[lane_index() % 4];
}

// Four elements as two pairs in fp16: of K in their order; of V, where a word has two dims of two
// tokens, elements 0 and 2, then 1 and 3.
__device__ inline uint2 k_pairs(E4m3, u32 word) {
  return make_uint2(fp16x2_of_e4m3x2(word & 0xffff), fp16x2_of_high_e4m3x2(word));
}
__device__ inline uint2 v_pairs(E4m3 type, u32 word) {
  return k_pairs(type, transpose_bytes_2x2(word));
}

// An e5m2 is the upper half of its fp16.
__device__ inline uint2 k_pairs(E5m2, u32 word) {
  return make_uint2(__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424));
}
__device__ inline uint2 v_pairs(E5m2, u32 word) {
  return make_uint2(__byte_perm(word, 0, 0x2404), __byte_perm(word, 0, 0x3414));
}

// Behind the byte 0x64, an int8 with its sign flipped reads as 1152 more in fp16.
constexpr u32 kFlippedSigns = 0x80808080;
constexpr u32 kHighByte = 0x64;
__device__ inline u32 unbiased(u32 pair) { return add_f16x2(pair, 0xe480e480); }
__device__ inline uint2 k_pairs(Int8, u32 word) {
  word ^= kFlippedSigns;
  return make_uint2(unbiased(__byte_perm(word, kHighByte, 0x4140)),
                    unbiased(__byte_perm(word, kHighByte, 0x4342)));
}
__device__ inline uint2 v_pairs(Int8, u32 word) {
  word ^= kFlippedSigns;
  return make_uint2(unbiased(__byte_perm(word, kHighByte, 0x4240)),
                    unbiased(__byte_perm(word, kHighByte, 0x4341)));
}

using KeyScales = NoBlockScales;
using ValueScales = NoBlockScales;
constexpr float kDequantFactor = 1.0f;

// ldmatrix loads two A fragments, one of each chunk of a pair: of K as they lie, of V transposed.
constexpr int kFragmentsPerLoad = 2;
__device__ inline void k_fragment(const u32 (&loaded)[4], int chunk, const KeyScales&, int,
                                  u32 (&a)[4]) {
  const uint2 first = k_pairs(StoredElement{}, loaded[chunk * 2]);
  const uint2 second = k_pairs(StoredElement{}, loaded[chunk * 2 + 1]);  // eight tokens further
  a[0] = first.x;
  a[1] = second.x;
  a[2] = first.y;
  a[3] = second.y;
}

__device__ inline void v_fragment(const u32 (&loaded)[4], int chunk, const ValueScales&, int,
                                  u32 (&a)[4]) {
  const uint2 first = v_pairs(StoredElement{}, loaded[chunk]);
  const uint2 second = v_pairs(StoredElement{}, loaded[chunk + 2]);  // eight tokens further
  a[0] = first.x;
  a[1] = first.y;
  a[2] = second.x;
  a[3] = second.y;
}

// Dim of accumulators `half * 2` and `half * 2 + 1` of a 16-dim tile. Of unaligned rows a lane has
// four adjacent dims in two tiles.
__device__ inline int dim_of_lane(int tile, int half) {
  const int lane = lane_index() / 4;
  if constexpr (kHasUnalignedRows) return tile / 2 * 32 + lane * 4 + tile % 2 * 2 + half;
  return tile * 16 + lane * 2 + half;
}

// Returns 0xff in each byte that is NaN or Inf; e4m3 has no Inf, int8 has neither.
__device__ inline u32 nonfinite_bytes(E4m3, u32 word) { return nan_bytes(word); }
__device__ inline u32 nonfinite_bytes(E5m2, u32 word) {
  const u32 is_nonfinite = ((word & 0x7c7c7c7c) + 0x04040404) & 0x80808080;
  return (is_nonfinite >> 7) * 0xff;
}
__device__ inline u32 nonfinite_bytes(Int8, u32) { return 0; }

// Zeroes NaN and Inf in a chunk, or in a word.
template <typename Part>
__device__ inline Part zero_nonfinite(Part part) {
#pragma unroll
  for (u32 word = 0; word < sizeof(Part) / sizeof(u32); ++word) {
    part.words[word] &= ~nonfinite_bytes(StoredElement{}, part.words[word]);
  }
  return part;
}

// Dequantized element of a cached V row.
__device__ inline float element_at(const unsigned char* row, int dim) {
  return cvt_f32(Fp16{}, static_cast<u16>(k_pairs(StoredElement{}, row[dim]).x));
}

// Stores a warp's accumulators of eight rows and kDims dims to rows of a combine buffer, from
// `first_column` on.
template <int kDims, int kPitch>
__device__ inline void store_to_combine_buffer(const Output& output, int group, int first_tile,
                                               int first_column,
                                               float (&combine_buffer)[8][kPitch]) {
#pragma unroll
  for (int tile = 0; tile < kDims / 16; ++tile) {
    const float (&acc)[4] = output[first_tile + tile][group];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float2*>(
          &combine_buffer[row_of(0, r)][first_column + dim_of_lane(tile, 0)]) =
          make_float2(acc[r], acc[2 + r]);
    }
  }
}
