// Accumulators of mma.m16n8k16 of one warp: element [m][n][e] lies in row fragment_row(m, e / 2)
// and column fragment_col(n, e % 2).

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/warp_matrix.cuh"

__device__ inline int fragment_row(int m, int half) { return m * 16 + half * 8 + lane_index() / 4; }
__device__ inline int fragment_col(int n, int i) { return n * 8 + lane_index() % 4 * 2 + i; }

template <int kM, int kN>
__device__ inline void clear_fragments(float (&d)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d[m][n][e] = 0.0f;
    }
  }
}

template <int kN>
__device__ inline void rescale_row(float (&d)[kN][4], int half, float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    d[n][half * 2] *= factor;
    d[n][half * 2 + 1] *= factor;
  }
}

// Columns n and n + 1 of d += a * b: `b` is what one ldmatrix loads, 16 x 16 elements.
template <int kM, int kN>
__device__ inline void mma_columns(float (&d)[kM][kN][4], int n, const u32 (&a)[kM][4],
                                   const u32 (&b)[4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    mma_m16n8k16(Element{}, d[m][n], a[m], b[0], b[1]);
    mma_m16n8k16(Element{}, d[m][n + 1], a[m], b[2], b[3]);
  }
}

// Rounds two adjacent elements of P, and adds them to the row sum as rounded.
__device__ inline u32 round_pair(float low, float high, float& row_sum) {
  const u32 pair = cvt_rn_x2_f32(Element{}, high, low);
  row_sum +=
      cvt_f32(Element{}, static_cast<u16>(pair)) + cvt_f32(Element{}, static_cast<u16>(pair >> 16));
  return pair;
}

// Adds two adjacent elements of V, times P, to those of a row of O.
__device__ inline void add_weighted_pair(float (&d)[4], int half, float p, u32 pair) {
  d[half * 2] += p * cvt_f32(Element{}, static_cast<u16>(pair));
  d[half * 2 + 1] += p * cvt_f32(Element{}, static_cast<u16>(pair >> 16));
}
