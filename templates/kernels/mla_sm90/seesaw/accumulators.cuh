// Accumulator fragments of O: the rows, output dims and fragments of a thread.

#pragma once

#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Both warpgroups have all rows. Warpgroup 0 has the first half of the output dims and computes S
// of even KV blocks, warpgroup 1 the second half and odd KV blocks (FlashMLA's seesaw).
constexpr int kHalfDims = kHeadDimVo / 2;
constexpr int kRowsPerThread = 2;
using Accumulators = float[kHalfDims / 2];
using Probabilities = u32[kBlockN / 4];  // two elements a word

__device__ inline int consumer_thread() { return static_cast<int>(threadIdx.x) % 128; }
__device__ inline bool is_wg0() { return threadIdx.x < 128; }

// Row `r`, 0 or 1, of this lane in warp `warp`; first row of a thread; row `r` of this thread.
__device__ inline int row_of(int warp, int r) { return warp % 4 * 16 + lane_index() / 4 + 8 * r; }
__device__ inline int row_of_thread(int thread) {
  return thread % 128 / kWarpLanes * 16 + thread % kWarpLanes / 4;
}
__device__ inline int row_of(int r) { return row_of_thread(reload_tid()) + 8 * r; }

// First dim of accumulator float4 `i`, which holds two adjacent dims of each of the two rows.
__device__ inline int dim_of(int warp, int i) {
  return warp / 4 * kHalfDims + i * 8 + lane_index() % 4 * 2;
}

// Row and dim of element `c` of accumulator float4 `i`.
__device__ inline int element_row(int warp, int, int c) { return row_of(warp, c / 2); }
__device__ inline int element_dim(int warp, int i, int c) { return dim_of(warp, i) + c % 2; }

__device__ inline float4 accumulator(const Accumulators& accumulators, int i) {
  return make_float4(accumulators[i * 4], accumulators[i * 4 + 1], accumulators[i * 4 + 2],
                     accumulators[i * 4 + 3]);
}

__device__ inline void set_accumulator(Accumulators& accumulators, int i, float4 value) {
  accumulators[i * 4] = value.x;
  accumulators[i * 4 + 1] = value.y;
  accumulators[i * 4 + 2] = value.z;
  accumulators[i * 4 + 3] = value.w;
}

// By the weights of its two rows.
__device__ inline float4 weighted(float4 value, float a, float b) {
  return make_float4(value.x * a, value.y * a, value.z * b, value.w * b);
}
__device__ inline float4 weighted(float4 value, const float (&weights)[kRowsPerThread], int) {
  return weighted(value, weights[0], weights[1]);
}

// A fragment is a float4 of every lane of a warp. The fragments of the same 16 rows are
// consecutive, in the order of their dims.
constexpr int kRowsPerGroup = 16;
constexpr int kFragsPerRowGroup = kHeadDimVo / 8;
__device__ inline int first_frag_of_warp(int warp) {
  return (warp % 4 * 2 + warp / 4) * kAccumulators;
}
__device__ constexpr int frag_offset(int i) { return i; }
__device__ constexpr int accumulator_in_frag_order(int frag) { return frag; }

// Rows of a fragment's float4: `a` of x and y, `b` of z and w.
struct FragRows {
  int a;
  int b;
};

__device__ inline FragRows frag_rows(u32 frag) {
  const int row = static_cast<int>(frag / kFragsPerRowGroup) * kRowsPerGroup + reload_lane() / 4;
  return {row, row + 8};
}

// Each half of a row has its own fp16 scale.
constexpr int kNumScales = 2;
__device__ inline int scale_of_warp(int warp) { return warp / 4; }
__device__ inline int scale_of_frag(u32 frag) { return frag / kAccumulators % 2; }

__device__ inline float4 accumulate_frag(float4 total, float4 value, float weight_a,
                                         float weight_b) {
  return make_float4(total.x + value.x * weight_a, total.y + value.y * weight_a,
                     total.z + value.z * weight_b, total.w + value.w * weight_b);
}

__device__ inline void rescale(Accumulators& accumulators, float a, float b) {
#pragma unroll
  for (int i = 0; i < kHalfDims / 2; i += 4) {
    accumulators[i] *= a;
    accumulators[i + 1] *= a;
    accumulators[i + 2] *= b;
    accumulators[i + 3] *= b;
  }
}
