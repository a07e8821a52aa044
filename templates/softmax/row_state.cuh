// What a row has come to.

#pragma once

#include "common/params.cuh"
#include "common/scales.cuh"
#include "common/types.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "softmax/row_result.cuh"

// A row's probabilities are relative to its reference. No maximum is asked for while none of them
// is larger than this, so that references move seldom.
constexpr float kMaxProbability = 0x1p8f;

struct RowState {
  float row_max;  // log2 units; what the accumulators are relative to
  float row_sum;  // of probabilities, relative to it
};

__device__ inline i64 global_row(const Params& params, const WorkItem& work, int row) {
  return work.first_query * params.heads + work.first_row + row;
}

// The LSE is in the base that the call asks for.
__device__ inline RowResult result_of(const Params& params, const WorkItem& work, int row,
                                      RowState state) {
  const float sink = params.sinks == nullptr || row >= work.rows
                         ? -kInfinity
                         : params.sinks[static_cast<u32>(work.first_row + row) % params.heads];
  return finish_row(state.row_max, state.row_sum, sink, params.lse_factor);
}

__device__ inline float output_scale(const Params& params) {
  return value_of(params.bmm2_scale_tensor, params.bmm2_scale);
}

// For fmaxf, which ignores a NaN.
__device__ inline float nan_unless_finite(float value) { return fmaf(value, 0.0f, value); }
