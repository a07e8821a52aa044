// Operands of the QK and PV GEMMs, over an FP8 KV cache.

#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/cvt.cuh"
#include "shared_memory.cuh"
#include "softmax/online_softmax.cuh"

// An FP8 (e4m3) KV cache is converted to fp16 in registers, which is exact.

// Loads a lane's fragment of 16 dims of Q, in the k order of its K fragment:
// four adjacent bytes of every 16.
__device__ inline uint2 load_q_fragment(const u16* source) {
  return reinterpret_cast<const uint2*>(source)[lane_index() % 4];
}

// A bf16 Q is converted to fp16. A power-of-two scale per row brings its amax into range.
constexpr bool kScalesQ = kIsSame<QueryElement, Bf16>;

// Exponent of the scale that brings `amax` to 2^14. The scale and its inverse are normal numbers.
__device__ inline int q_scale_exponent(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return 14 - min(max(exponent, -100), 127);
}

__device__ inline float pow2(int exponent) {
  return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// Converts two bf16, times a power of two, to fp16.
__device__ inline u32 bf16x2_to_fp16x2(u32 pair, float scale) {
  return cvt_rn_x2_f32(Fp16{}, cvt_f32(Bf16{}, static_cast<u16>(pair >> 16)) * scale,
                       cvt_f32(Bf16{}, static_cast<u16>(pair)) * scale);
}

// Larger magnitude of two bf16; fmaxf ignores a NaN.
__device__ inline float pair_amax(u32 pair) {
  return fmaxf(fabsf(cvt_f32(Bf16{}, static_cast<u16>(pair))),
               fabsf(cvt_f32(Bf16{}, static_cast<u16>(pair >> 16))));
}

// Converts a lane's fragment of a Q row to fp16, in place; returns the inverse of the row's scale.
__device__ inline float convert_q_row(QFragment& row) {
  if constexpr (!kScalesQ) return 1.0f;
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    amax = fmaxf(amax, fmaxf(pair_amax(row[k].x), pair_amax(row[k].y)));
  }
  const int exponent = q_scale_exponent(quad_reduce_max(amax));
  const float scale = pow2(exponent);
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    row[k] = make_uint2(bf16x2_to_fp16x2(row[k].x, scale), bf16x2_to_fp16x2(row[k].y, scale));
  }
  return pow2(-exponent);
}

__device__ inline u32 low_pair(u32 word) { return fp16x2_of_e4m3x2(word & 0xffff); }
__device__ inline u32 high_pair(u32 word) { return fp16x2_of_high_e4m3x2(word); }

// ldmatrix loads two A fragments, one of each chunk of a pair: of K as they lie, of V transposed.
constexpr int kFragmentsPerLoad = 2;
__device__ inline void k_fragment(const u32 (&loaded)[4], int chunk, u32 (&a)[4]) {
  const u32 first = loaded[chunk * 2];
  const u32 second = loaded[chunk * 2 + 1];  // eight tokens further
  a[0] = low_pair(first);
  a[1] = low_pair(second);
  a[2] = high_pair(first);
  a[3] = high_pair(second);
}

__device__ inline void v_fragment(const u32 (&loaded)[4], int chunk, u32 (&a)[4]) {
  const u32 first = transpose_bytes_2x2(loaded[chunk]);
  const u32 second = transpose_bytes_2x2(loaded[chunk + 2]);  // eight tokens further
  a[0] = low_pair(first);
  a[1] = high_pair(first);
  a[2] = low_pair(second);
  a[3] = high_pair(second);
}

// Dim of accumulators `half * 2` and `half * 2 + 1` of a 16-dim tile.
__device__ inline int dim_of_lane(int tile, int half) {
  return tile * 16 + lane_index() / 4 * 2 + half;
}

// Zeroes NaN in a chunk; e4m3 has no Inf.
__device__ inline Chunk zero_nonfinite(Chunk chunk) {
#pragma unroll
  for (int word = 0; word < 4; ++word) chunk.words[word] &= ~nan_bytes(chunk.words[word]);
  return chunk;
}

// Dequantized element of a cached V row.
__device__ inline float element_at(const unsigned char* row, int dim) {
  return cvt_f32(Fp16{}, static_cast<u16>(low_pair(row[dim])));
}

// Stores a warp's accumulators of eight rows and kCombineDims dims to `combine_buffer`.
__device__ inline void store_to_combine_buffer(const Output& output, int group, int first_tile,
                                               float (&combine_buffer)[8][kCombinePitch]) {
#pragma unroll
  for (int tile = 0; tile < kCombineDims / 16; ++tile) {
    const float (&acc)[4] = output[first_tile + tile][group];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float2*>(&combine_buffer[row_of(0, r)][dim_of_lane(tile, 0)]) =
          make_float2(acc[r], acc[2 + r]);
    }
  }
}
