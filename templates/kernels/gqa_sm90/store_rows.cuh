// Stores of O rows: finished rows into the output, partial rows of a split into the workspace.

#pragma once

#include "common/params.cuh"
#include "common/store_vec4.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/row_result.cuh"
#include "work_item.cuh"

// Workspace slot of a split. Each CTA has two slots per kv head: for the split that its range
// begins with, and for the one that it ends with.
__device__ inline int partial_slot(const Params& params, const WorkItem& work, int split_idx) {
  const int slot =
      (work.first_split_cta + split_idx * params.cta_group_size) * 2 + (split_idx == 0 ? 1 : 0);
  return slot * kHeadsPerCta + work.kv_head % kHeadsPerCta;
}

__device__ inline RowState* partial_states(const Params& params, int slot) {
  return reinterpret_cast<RowState*>(params.partial_states) + slot * kBlockM;
}

// Four adjacent dims of a row of partial O.
__device__ inline float4* partial_out_ptr(const Params& params, int slot, int row, int dim) {
  return reinterpret_cast<float4*>(params.partial_out +
                                   (slot * kBlockM + row) * static_cast<i64>(kHeadDim) + dim);
}

__device__ inline float4 add_weighted(float4 total, float4 value, float weight) {
  return make_float4(total.x + value.x * weight, total.y + value.y * weight,
                     total.z + value.z * weight, total.w + value.w * weight);
}

// Normalises and stores four adjacent dims of a finished row.
__device__ inline void store_finished(const Params& params, const WorkItem& work, int row, int dim,
                                      RowState state, float4 out) {
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[work.head_of(params, row)];
  const float scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  const float factor = finish_row(state.row_max, state.row_sum, sink).factor * scale;
  store_x4(OutElement{}, params.out, work.global_row(params, row) * kHeadDim + dim, out.x * factor,
           out.y * factor, out.z * factor, out.w * factor);
}
