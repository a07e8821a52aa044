// QK and PV GEMMs over a 16-bit KV cache, which needs no conversion.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "shared_memory.cuh"

// Loads a lane's fragment of 16 dims of Q, in the k order of its K fragment.
__device__ inline uint2 load_q_fragment(const u16* source) {
  const u32* pairs = reinterpret_cast<const u32*>(source) + lane_index() % 4;
  return make_uint2(pairs[0], pairs[4]);
}

// Q needs no conversion.
constexpr bool kScalesQ = false;
__device__ inline float convert_q_row(QueryRow&) { return 1.0f; }

// QK GEMM of one step: S^T = K Q^T.
template <typename Query>
__device__ inline void qk_gemm(const LdmatrixRows& rows, const unsigned char* keys, int step,
                               const Query& query, float (&scores)[kRowGroups][4]) {
  constexpr int kChains = kRowGroups == 1 ? 2 : 1;  // independent MMA chains
  float sums[kChains][kRowGroups][4] = {};
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) {
    u32 k[4];
    ldmatrix_x4(k, rows.at(keys, step, pair));
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
      const uint2 q = query.at(n, pair);
      mma_m16n8k16(Element{}, sums[pair % kChains][n], k, q.x, q.y);
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

// PV GEMM of one step: O^T += V^T P^T. Returns a word that depends on all V fragments, for
// arrive_after_reads.
__device__ inline u32 pv_gemm(const LdmatrixRows& rows, const unsigned char* values, int step,
                              const u32 (&probabilities)[kRowGroups][2], Output& output) {
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) {
    u32 v[4];
    ldmatrix_x4_trans(v, rows.at(values, step, pair));
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
      mma_m16n8k16(Element{}, output[pair][n], v, probabilities[n][0], probabilities[n][1]);
    }
  }
  u32 read = 0;  // from accumulators, because a word of every V fragment would take registers
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) read ^= __float_as_uint(output[pair][0][0]);
  return read;
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

// Stores a warp's accumulators of eight rows and kCombineDims dims to `combine_buffer`.
__device__ inline void store_to_combine_buffer(const Output& output, int group, int first_tile,
                                               float (&combine_buffer)[8][kCombinePitch]) {
#pragma unroll
  for (int tile = 0; tile < kCombineDims / 16; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      combine_buffer[row_of(0, e % 2)][dim_of_lane(tile, e / 2)] =
          output[first_tile + tile][group][e];
    }
  }
}
