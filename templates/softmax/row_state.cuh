// What a row has come to.

#pragma once

#include "common/params.cuh"
#include "common/scales.cuh"
#include "common/types.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "softmax/row_result.cuh"

// A row's probabilities are relative to its reference. No maximum is asked for while none of them
// is larger than this, so that references move seldom.
constexpr float kMostProbability = 0x1p8f;

struct RowState {
  float reference;  // log2 units; what the accumulators are relative to
  float sum;  // of probabilities, relative to it
};

__device__ inline i64 global_row(const Params& params, const Item& item, int row) {
  return item.first_query * params.heads + item.first_row + row;
}

// The LSE is in the base that the call asks for.
__device__ inline RowResult result_of(const Params& params, const Item& item, int row,
                                      RowState state) {
  const float sink = params.sinks == nullptr || row >= item.rows
                         ? -kInfinity
                         : params.sinks[static_cast<u32>(item.first_row + row) % params.heads];
  return finish_row(state.reference, state.sum, sink, params.lse_factor);
}

__device__ inline float output_scale(const Params& params) {
  return value_of(params.bmm2_scale_tensor, params.bmm2_scale);
}

// For fmaxf, which ignores a NaN.
__device__ inline float nan_unless_finite(float value) { return fmaf(value, 0.0f, value); }
