// Epilogue: stores finished rows, or the partial O and LSE of one split.

#pragma once

#include "common/mma_fragments.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma.cuh"
#include "ptx/cvt.cuh"
#include "softmax/row_state.cuh"
#include "work_item.cuh"

// Row sum over all token warps, after Softmax::publish and a barrier.
__device__ inline float total_row_sum(const SharedMemoryPlan& smem, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kTokenWarps; ++warp) sum += smem.row_partial[warp][row];
  return sum;
}

// One split of several: normalized fp32 rows and their base-2 LSE. An empty row has LSE minus
// infinity, and its values are never read.
__device__ inline void store_partial(const Params& params, const SharedMemoryPlan& smem,
                                     const Output& output) {
  const WorkItem& work = smem.work;
  const i64 split_row = work.split_idx * params.total_rows;
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(m, half);
      if (row >= work.rows) continue;
      const i64 target = split_row + work.global_row(row);
      const RowResult result = finish_row_without_sink(smem.row_max[row], total_row_sum(smem, row));
      float* values = params.partial_out + target * kHeadDimVo;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n) {
        *reinterpret_cast<float2*>(values + output_dim(n, 0)) = make_float2(
            output[m][n][half * 2] * result.factor, output[m][n][half * 2 + 1] * result.factor);
      }
      if (warp_index() == 0 && lane_index() % 4 == 0) params.partial_lse[target] = result.lse;
    }
  }
}

// Final rows, staged through the shared memory of Q so that stores are whole 128-byte lines.
__device__ inline void store_final(const Params& params, SharedMemoryPlan& smem,
                                   const Output& output) {
  const WorkItem& work = smem.work;
  const float output_scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale);
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = fragment_row(m, half);
      const float sink = params.sinks == nullptr || row >= work.rows
                             ? -kInfinity
                             : params.sinks[(work.first_row + row) % work.heads];
      const RowResult result =
          finish_row(smem.row_max[row], total_row_sum(smem, row), sink, params.lse_factor);
      const float factor = result.factor * output_scale;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n) {
        const int dim = output_dim(n, 0);
        const u32 offset =
            swizzled_offset<kTokenBytes>(row, dim / kChunkElements) + dim % kChunkElements * 2;
        *reinterpret_cast<u32*>(smem.query + offset) = cvt_rn_x2_f32(
            OutElement{}, output[m][n][half * 2 + 1] * factor, output[m][n][half * 2] * factor);
      }
      if (params.lse != nullptr && warp_index() == 0 && lane_index() % 4 == 0 && row < work.rows) {
        params.lse[work.global_row(row)] = result.lse;
      }
    }
  }
  __syncthreads();
  constexpr int kChunks = kHeadDimVo / kChunkElements;
  for (int i = static_cast<int>(threadIdx.x); i < work.rows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const uint4 value =
        *reinterpret_cast<const uint4*>(smem.query + swizzled_offset<kTokenBytes>(row, chunk));
    reinterpret_cast<uint4*>(params.out + work.global_row(row) * kHeadDimVo)[chunk] = value;
  }
}
