// Combine (split-KV reduction): weighs the partial O of all splits by their LSE.

#pragma once

#include "common/output_gate.cuh"
#include "common/params.cuh"
#include "common/store_vec4.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "softmax/row_state.cuh"

struct SharedMemoryPlan {
  float row_sum[kWarps];
  float4 values[kWarps][kWarpLanes];
};

__device__ inline float warp_reduce_max(float value) {
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Max LSE of the row over its splits; every warp computes it.
__device__ inline float row_max_lse(const Params& params, i64 row) {
  float max_lse = -kInfinity;
  for (int split = lane_index(); split < params.num_splits; split += kWarpLanes) {
    max_lse = fmaxf(max_lse, params.partial_lse[split * params.total_rows + row]);
  }
  return warp_reduce_max(max_lse);
}

// Splits loaded per step by one warp, which takes every kWarps-th split. Loads are issued together:
// dependent loads would dominate this kernel.
constexpr int kSplitsPerStep = 8;

struct SplitPartials {
  float lse[kSplitsPerStep];
  float4 values[kSplitsPerStep];

  // Loads splits from `first` on. `values` is undefined where there is no split or it is empty.
  __device__ SplitPartials(const Params& params, i64 row, int dim, int first) {
    const i64 partial_row = first * params.total_rows + row;
    const float* lse_of_row = params.partial_lse + partial_row;
    const float* values_of_row = params.partial_out + partial_row * kHeadDimVo + dim;
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      const bool exists = first + i * kWarps < params.num_splits;
      lse[i] = exists ? *lse_of_row : -kInfinity;
      if (exists) values[i] = *reinterpret_cast<const float4*>(values_of_row);
      lse_of_row += kWarps * params.total_rows;
      values_of_row += kWarps * params.total_rows * kHeadDimVo;
    }
  }

  // Adds the splits that are not empty.
  __device__ void add_to(RowPart& total) const {
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      if (lse[i] == -kInfinity) continue;
      // O is normalized: the LSE is its row max, and the row sum is 1.
      total.add({lse[i], 1.0f}, values[i]);
    }
  }
};

__device__ inline void combine(const Params& params, SharedMemoryPlan& smem) {
  const int row = static_cast<int>(blockIdx.x) / kSlices;
  const int dim = static_cast<int>(blockIdx.x) % kSlices * kSliceDims + lane_index() * 4;
  const bool is_outside = dim >= kHeadDimVo;  // the last slice may be partial
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[row % params.heads];
  const float scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  RowPart partial;
#pragma unroll 1
  for (int first = 0; first < params.num_splits; first += kSplitsPerStep * kWarps) {
    const SplitPartials rows(params, row, is_outside ? 0 : dim, first + warp_index());
    // Overlaps the loads of `rows`.
    if (first == 0) partial.state.row_max = row_max_lse(params, row);
    rows.add_to(partial);
  }
  smem.values[warp_index()][lane_index()] = partial.out;
  if (lane_index() == 0) smem.row_sum[warp_index()] = partial.state.row_sum;
  __syncthreads();
  if (warp_index() != 0) return;

  float row_sum = 0.0f;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float4 value = smem.values[warp][lane_index()];
    row_sum += smem.row_sum[warp];
    total.x += value.x;
    total.y += value.y;
    total.z += value.z;
    total.w += value.w;
  }
  const RowResult result = finish_row(partial.state.row_max, row_sum, sink, params.lse_factor);
  const float factor = result.factor * scale;
  if (!is_outside) {
    total = make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor);
    const i64 offset = static_cast<i64>(row) * kHeadDimVo + dim;
    if constexpr (kHasOutputGate) total = gated_output(OutElement{}, params, offset, total);
    store_x4(OutElement{}, params.out, offset, total.x, total.y, total.z, total.w);
  }
  if (params.lse != nullptr && blockIdx.x % kSlices == 0 && lane_index() == 0) {
    params.lse[row] = result.lse;
  }
}
