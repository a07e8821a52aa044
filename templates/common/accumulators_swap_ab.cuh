// Accumulator fragments of O^T (swap-AB): the rows, output dims and fragments of a thread.

#pragma once

#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Swap-AB: O^T = V^T P^T, so M counts output dims and N counts query rows.
// One warpgroup has all output dims, or two have one half each. An MMA gives a warp a tile of 16
// dims, two of them to a thread: g and g + 8 of the tile, with g = lane / 4, if one warpgroup reads
// V from shared memory; 2g and 2g + 1 if two warpgroups transpose it in pairs. `kTileDims` is the
// distance between the tiles of a warp.
constexpr int kWarpgroups = kPvWarps / 4;
constexpr int kDimTiles = kHeadDimVo / kPvWarps / 16;  // of a warp
constexpr int kWarpDims = kTileDims == 16 ? kDimTiles * 16 : 16;  // distance between warps

static_assert(kTileDims % 16 == 0, "tiles of 16 dims are this far apart");

constexpr int kRowGroups = kBlockM / 8;
constexpr int kRowsPerThread = kRowGroups * 2;
using Accumulators = float[kDimTiles][kBlockM / 2];

// First dim of accumulator float4 `i` of this lane in warp `warp`.
__device__ inline int dim_of(int warp, int i) {
  constexpr bool kHasHalves = kWarpgroups == 2 && kTileDims > 16;
  const int first = kHasHalves ? warp / 4 * (kHeadDimVo / 2) : 0;
  return first + i / kRowGroups * kTileDims + (kHasHalves ? warp % 4 : warp) * kWarpDims +
         reload_lane() / 4 * (kWarpgroups == 1 ? 1 : 2);
}

// Dim of component `c` of float4 `i`.
__device__ inline int element_dim(int warp, int i, int c) {
  return dim_of(warp, i) + c / 2 * (kWarpgroups == 1 ? 8 : 1);
}

// Row `r` of this thread, the same in all warps. Lanes that are equal modulo 4 hold the same rows.
__device__ inline int row_of(int r) { return r / 2 * 8 + reload_lane() % 4 * 2 + r % 2; }

// Row of component `c` of float4 `i`.
__device__ inline int element_row(int, int i, int c) { return row_of(i % kRowGroups * 2 + c % 2); }

__device__ inline float4 accumulator(const Accumulators& accumulators, int i) {
  const float* acc = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  return make_float4(acc[0], acc[1], acc[2], acc[3]);
}

__device__ inline void set_accumulator(Accumulators& accumulators, int i, float4 value) {
  float* acc = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  acc[0] = value.x;
  acc[1] = value.y;
  acc[2] = value.z;
  acc[3] = value.w;
}

// Rescales a group of eight rows; a thread holds two of them.
__device__ inline void rescale_group(Accumulators& accumulators, int group, float2 factor) {
#pragma unroll
  for (int tile = 0; tile < kDimTiles; ++tile) {
    float* acc = accumulators[tile] + group * 4;
    acc[0] *= factor.x;
    acc[1] *= factor.y;
    acc[2] *= factor.x;
    acc[3] *= factor.y;
  }
}

// A float4 of accumulators holds two rows of each of its two dims; `a` and `b` are their weights.
__device__ inline float4 weighted(float4 value, float a, float b) {
  return make_float4(value.x * a, value.y * b, value.z * a, value.w * b);
}
__device__ inline float4 weighted(float4 value, const float (&weights)[kRowsPerThread], int i) {
  return weighted(value, weights[i % kRowGroups * 2], weights[i % kRowGroups * 2 + 1]);
}

// Fragment order in memory: by group of eight rows, then by warp.
constexpr int kRowsPerGroup = 8;
constexpr int kFragsPerRowGroup = kPvWarps * kDimTiles;

__device__ inline int first_frag_of_warp(int warp) { return warp * kDimTiles; }

// Position of float4 `i` relative to the first fragment of its warp.
__device__ constexpr int frag_offset(int i) {
  return i % kRowGroups * kFragsPerRowGroup + i / kRowGroups;
}

// The float4 with index `frag` in this order.
__device__ constexpr int accumulator_in_frag_order(int frag) {
  return frag % kDimTiles * kRowGroups + frag / kDimTiles;
}

// The warp that holds a fragment, and the index of the fragment among its float4s.
__device__ inline int warp_of_frag(u32 frag) {
  return static_cast<int>(frag % kFragsPerRowGroup / kDimTiles);
}
__device__ inline int accumulator_of_frag(u32 frag) {
  return frag % kDimTiles * kRowGroups + frag / kFragsPerRowGroup % kRowGroups;
}

struct FragRows {
  int a;
  int b;
};

__device__ inline FragRows frag_rows(u32 frag) {
  const int row = row_of(frag / kFragsPerRowGroup % kRowGroups * 2);
  return {row, row + 1};
}

// One fp16 scale per row.
constexpr int kNumScales = 1;
__device__ inline int scale_of_warp(int) { return 0; }
__device__ inline int scale_of_frag(u32) { return 0; }

__device__ inline float4 accumulate_frag(float4 total, float4 value, float weight_a,
                                         float weight_b) {
  return make_float4(total.x + value.x * weight_a, total.y + value.y * weight_b,
                     total.z + value.z * weight_a, total.w + value.w * weight_b);
}

// Over the lanes that hold the same rows.
__device__ inline float max_over_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}
