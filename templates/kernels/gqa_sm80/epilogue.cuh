// Epilogue: combines the partial O of the warps of a CTA, and stores finished rows, or the partial
// O and LSE of one split.

#pragma once

#include "common/fixed_splits.cuh"
#include "common/mma_fragments.cuh"
#include "common/output_gate.cuh"
#include "common/params.cuh"
#include "common/store_vec4.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma.cuh"
#include "ptx/arithmetic.cuh"
#include "softmax/row_state.cuh"
#include "work_item.cuh"

// Row max over all warps.
__device__ inline float combined_row_max(const SharedMemoryPlan& smem, int row) {
  float row_max = -kInfinity;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    row_max = fmaxf(row_max, smem.row_max[warp][row]);
  }
  return row_max;
}

// Weight of a warp's partial row relative to `row_max`.
__device__ inline float combine_weight(const SharedMemoryPlan& smem, int warp, int row,
                                       float row_max) {
  const float own = smem.row_max[warp][row];
  return own == -kInfinity ? 0.0f : ex2_approx(own - row_max);
}

// Offset of a row in `combine_buffer`, whose rows are padded by 16 bytes.
__device__ constexpr int combine_buffer_row(int row) { return row * (kSliceDims + 4); }

// Sums the weighted O of all warps, one warp after the other. After the first barrier no warp reads
// the KV stages that `combine_buffer` aliases, and row max and row sum of all warps are visible.
// Ends with a barrier too.
__device__ inline void combine_warps(SharedMemoryPlan& smem, const Output& output) {
  __syncthreads();
#pragma unroll 1
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp_index() == warp) {
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = fragment_row(m, half);
          const float factor = combine_weight(smem, warp, row, combined_row_max(smem, row));
          float* target = smem.combine_buffer + combine_buffer_row(row);
#pragma unroll
          for (int n = 0; n < kSliceDims / 8; ++n) {
            float2* pair = reinterpret_cast<float2*>(target + fragment_col(n, 0));
            const float2 before = warp == 0 ? make_float2(0.0f, 0.0f) : *pair;
            // A warp of weight 0 adds nothing, whatever its accumulators hold.
            *pair = factor == 0.0f ? before
                                   : make_float2(before.x + output[m][n][half * 2] * factor,
                                                 before.y + output[m][n][half * 2 + 1] * factor);
          }
        }
      }
    }
    __syncthreads();
  }
}

__device__ inline float output_scale_of(const Params& params) {
  return value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
}

// Whether finished rows are normalized and then scaled, in the roundings of the combine kernel. The
// width of a sparse call's indices decides whether a list has splits behind its only tokens.
constexpr bool kScalesLikeCombine = kBatchInvariant && kIsSparse;

// Stores the normalization factor of each row over the row sums of warp 0, and the LSE: of a split
// in base 2 and without the sink, of finished rows if the call requests it. An empty row of a split
// has LSE minus infinity, and its partial O is never read.
__device__ inline void finish_rows(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem) {
  const bool is_partial = num_splits_of(params, work) > 1;
  for (int row = static_cast<int>(threadIdx.x); row < work.rows; row += kThreads) {
    const float row_max = combined_row_max(smem, row);
    float row_sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      row_sum += smem.row_sum[warp][row] * combine_weight(smem, warp, row, row_max);
    }
    const float sink = is_partial || params.sinks == nullptr
                           ? -kInfinity
                           : params.sinks[work.head_of(params, row)];
    const RowResult result =
        finish_row(row_max, row_sum, sink, is_partial ? 1.0f : params.lse_factor);
    const float output_scale = is_partial || kScalesLikeCombine ? 1.0f : output_scale_of(params);
    smem.row_sum[0][row] = result.factor * output_scale;
    if (work.slice != 0) continue;
    const i64 global_row = work.global_row(params, row);
    if (is_partial) {
      params.partial_lse[work.split_idx * params.total_rows + global_row] = result.lse;
    } else if (params.lse != nullptr) {
      params.lse[global_row] = result.lse;
    }
  }
  __syncthreads();
}

__device__ inline float4 scaled(const float4& value, float factor) {
  return make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
}

// Stores normalized fp32 rows of one split, or final rows.
__device__ inline void store_output(const Params& params, const WorkItem& work,
                                    const SharedMemoryPlan& smem) {
  constexpr int kQuads = kSliceDims / 4;
  for (int i = static_cast<int>(threadIdx.x); i < work.rows * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int dim = i % kQuads * 4;
    const float factor = smem.row_sum[0][row];
    float4 value =
        *reinterpret_cast<const float4*>(smem.combine_buffer + combine_buffer_row(row) + dim);
    value = scaled(value, factor);
    const i64 global_row = work.global_row(params, row);
    const int column = work.slice * kSliceDims + dim;
    if (num_splits_of(params, work) > 1) {
      const i64 partial_row = work.split_idx * params.total_rows + global_row;
      *reinterpret_cast<float4*>(params.partial_out + partial_row * kHeadDimVo + column) = value;
    } else {
      const i64 offset = global_row * kHeadDimVo + column;
      if constexpr (kScalesLikeCombine) value = scaled(value, output_scale_of(params));
      if constexpr (kHasOutputGate) value = gated_output(OutElement{}, params, offset, value);
      store_x4(OutElement{}, params.out, offset, value.x, value.y, value.z, value.w);
    }
  }
}
