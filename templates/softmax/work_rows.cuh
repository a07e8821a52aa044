// Rows of a work item: the update of a row max; the place, the sink and the result of a row.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "softmax/row_state.cuh"

// P is relative to a stale row max. The max is not recomputed while no element of P exceeds this,
// so that rescales are rare.
constexpr float kMaxUnnormalizedP = 0x1p8f;

// Above this magnitude of the row max, the rounding of a score changes P by more than its
// tolerance.
constexpr float kLargeRowMax = 0x1p14f;  // log2 domain

// Raises a row max to `target`, and rescales its row sum l by alpha, which is returned, for O. A
// target that is lower, or NaN, changes nothing.
__device__ inline float raise_row_max(float& row_max, float& row_sum, float target) {
  const float next = target > row_max ? target : row_max;
  const float alpha = ex2_approx(row_max - next);
  row_max = next;
  row_sum *= alpha;
  return alpha;
}

__device__ inline i64 global_row(const Params& params, const WorkItem& work, int row) {
  return work.first_query * params.heads + work.first_row + row;
}

// Minus infinity without sinks, and for a row that does not exist.
__device__ inline float sink_of(const Params& params, const WorkItem& work, int row) {
  if (params.sinks == nullptr || row >= work.rows) return -kInfinity;
  const u32 packed_row = work.first_row + row;
  const u32 heads = params.heads;
  // A sequence of top-k indices has one query token; the branch avoids an integer division.
  return params.sinks[kIsSparse || packed_row < heads ? packed_row : packed_row % heads];
}

// The LSE is in the base of the call.
__device__ inline RowResult result_of(const Params& params, RowState state, float sink) {
  return finish_row(state.row_max, state.row_sum, sink, params.lse_factor);
}

__device__ inline float output_scale(const Params& params) {
  return value_of(params.bmm2_scale_tensor, params.bmm2_scale);
}

// For fmaxf, which ignores a NaN.
__device__ inline float nan_unless_finite(float value) { return fmaf(value, 0.0f, value); }
