// The products where keys and values are e4m3: they become fp16 in registers, which is exact.

#pragma once

#include "common/fp8.cuh"
#include "common/fp8_nan.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "shared_memory.cuh"

// A lane's part of 16 elements of the query: it has four neighbouring bytes of a key's 16.
__device__ inline uint2 fragment_of(const u16* source) {
  return reinterpret_cast<const uint2*>(source)[lane_index() % 4];
}

// Rows of a bf16 query are multiplied as fp16, each times a power of two that brings its largest
// element into range.
constexpr bool kScalesQuery = kIsSame<QueryElement, Bf16>;

// The exponent that brings `amax` to 2^14. It and its negative are those of normal numbers.
__device__ inline int fitting_exponent(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return 14 - min(max(exponent, -100), 127);
}

__device__ inline float pow2(int exponent) {
  return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// A pair of bf16 times a power of two, as fp16.
__device__ inline u32 fit_pair(u32 pair, float scale) {
  return cvt_rn_x2_f32(Fp16{}, cvt_f32(Bf16{}, static_cast<u16>(pair >> 16)) * scale,
                       cvt_f32(Bf16{}, static_cast<u16>(pair)) * scale);
}

// The larger magnitude of a pair of bf16; a NaN has none.
__device__ inline float pair_amax(u32 pair) {
  return fmaxf(fabsf(cvt_f32(Bf16{}, static_cast<u16>(pair))),
               fabsf(cvt_f32(Bf16{}, static_cast<u16>(pair >> 16))));
}

// Turns a lane's part of a row of the query into fp16, in place; returns what undoes its scaling.
__device__ inline float fit_row(QueryRow& row) {
  if constexpr (!kScalesQuery) return 1.0f;
  float amax = 0.0f;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    amax = fmaxf(amax, fmaxf(pair_amax(row[k].x), pair_amax(row[k].y)));
  }
  // Four lanes hold a row together.
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
  const int exponent = fitting_exponent(amax);
  const float scale = pow2(exponent);
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    row[k] = make_uint2(fit_pair(row[k].x, scale), fit_pair(row[k].y, scale));
  }
  return pow2(-exponent);
}

__device__ inline u32 low_pair(u32 word) { return fp16x2_of_e4m3x2(word & 0xffff); }
__device__ inline u32 high_pair(u32 word) { return fp16x2_of_high_e4m3x2(word); }

// Scores of one step: S^T = K Q^T. Of a pair of chunks each is a step of mma.
template <typename Query>
__device__ inline void qk_gemm(const MatrixRows& rows, const unsigned char* keys, int step,
                               const Query& query, float (&scores)[kRowGroups][4]) {
  constexpr int kChains = kRowGroups == 1 ? 2 : 1;  // products that do not wait for each other
  float sums[kChains][kRowGroups][4] = {};
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) {
    u32 k[4];
    ldmatrix_x4(k, rows.at(keys, step, pair));
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const u32 first = k[chunk * 2];
      const u32 second = k[chunk * 2 + 1];  // eight tokens further
      const u32 a[4] = {low_pair(first), low_pair(second), high_pair(first), high_pair(second)};
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
        const uint2 q = query.at(n, pair * 2 + chunk);
        mma_m16n8k16(Element{}, sums[chunk % kChains][n], a, q.x, q.y);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = kChains == 1 ? sums[0][n][e] : sums[0][n][e] + sums[kChains - 1][n][e];
    }
  }
}

// From two dims of one token and then of the next to two tokens of one dim and then of the next.
__device__ inline u32 by_dims(u32 word) { return __byte_perm(word, 0, 0x3120); }

// Adds one step to the output: O^T += V^T P^T. Returns a word made of all that has been read.
__device__ inline u32 pv_gemm(const MatrixRows& rows, const unsigned char* values, int step,
                              const u32 (&probabilities)[kRowGroups][2], Output& output) {
  u32 read = 0;  // of what values become, for they become it in better order than of themselves
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) {
    u32 v[4];
    ldmatrix_x4_trans(v, rows.at(values, step, pair));
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const u32 first = by_dims(v[chunk]);
      const u32 second = by_dims(v[chunk + 2]);  // eight tokens further
      const u32 a[4] = {low_pair(first), high_pair(first), low_pair(second), high_pair(second)};
      if (chunk == 1) read ^= a[0];
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
        mma_m16n8k16(Element{}, output[pair * 2 + chunk][n], a, probabilities[n][0],
                     probabilities[n][1]);
      }
    }
  }
  return read;
}

// The dim of accumulators `half * 2` and `half * 2 + 1` of a tile of dims.
__device__ inline int dim_of_lane(int tile, int half) {
  return tile * 16 + lane_index() / 4 * 2 + half;
}

// A chunk with zeros for what is no number.
__device__ inline Chunk finite_part(Chunk chunk) {
#pragma unroll
  for (int word = 0; word < 4; ++word) chunk.words[word] &= ~nan_bytes(chunk.words[word]);
  return chunk;
}

// A stored element.
__device__ inline float element_at(const unsigned char* row, int dim) {
  return cvt_f32(Fp16{}, static_cast<u16>(low_pair(row[dim])));
}

// Leaves a warp's accumulators of eight rows and kCombineDims dims in `combine_buffer`.
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
