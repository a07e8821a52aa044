// Partials of work tiles in the workspace, and the store of finished rows.

#pragma once

#include "common/output_gate.cuh"
#include "common/params.cuh"
#include "common/store_vec4.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma.cuh"
#include "softmax/row_state.cuh"
#include "work_item.cuh"

__device__ inline RowState* partial_states(const Params& params, int slot) {
  return reinterpret_cast<RowState*>(params.partial_states) + slot * kBlockM;
}

// Four adjacent dims of a row of partial O.
__device__ inline float4* partial_out_ptr(const Params& params, int slot, int row, int dim) {
  return reinterpret_cast<float4*>(params.partial_out +
                                   (slot * kBlockM + row) * static_cast<i64>(kHeadDimVo) + dim);
}

// Normalizes and stores four adjacent dims of a finished row; with the first ones, its LSE if the
// call requests it.
__device__ inline void store_finished(const Params& params, const WorkItem& work, int row, int dim,
                                      const RowPart& partial) {
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[work.head_of(params, row)];
  const float scale =
      value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor * kDequantFactor;
  const RowResult result =
      finish_row(partial.state.row_max, partial.state.row_sum, sink, params.lse_factor);
  const float factor = result.factor * scale;
  const i64 global_row = work.global_row(params, row);
  const i64 offset = global_row * kHeadDimVo + dim;
  float4 out = make_float4(partial.out.x * factor, partial.out.y * factor, partial.out.z * factor,
                           partial.out.w * factor);
  if constexpr (kHasOutputGate) out = gated_output(OutElement{}, params, offset, out);
  store_x4(OutElement{}, params.out, offset, out.x, out.y, out.z, out.w);
  if (dim == 0 && params.lse != nullptr) params.lse[global_row] = result.lse;
}
