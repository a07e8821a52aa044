// Arithmetic of the combine: the parts of a row that splits or warps have, weighted by their
// softmax states. Partial O and row sum of a part are relative to its row max.

#pragma once

#include "common/types.cuh"
#include "ptx/arithmetic.cuh"
#include "softmax/row_result.cuh"

// A row that attends to nothing. Its row max is finite: a difference of minus infinities is NaN.
constexpr RowState kEmptyRow = {-kFloatMax, 0.0f};

template <int kCount>
__device__ inline float max_of(const RowState (&states)[kCount]) {
  float row_max = states[0].row_max;
#pragma unroll
  for (int i = 1; i < kCount; ++i) row_max = fmaxf(row_max, states[i].row_max);
  return row_max;
}

// Weight of a part in a row whose max is `row_max`.
__device__ inline float weight_of(const RowState& part, float row_max) {
  return ex2_approx(part.row_max - row_max);
}

// Weights of parts; returns their row sum.
template <int kCount>
__device__ inline float weigh(const RowState (&states)[kCount], float row_max,
                              float (&weights)[kCount]) {
  float row_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    weights[i] = weight_of(states[i], row_max);
    row_sum += states[i].row_sum * weights[i];
  }
  return row_sum;
}

// Four adjacent dims of a row of partial O, as a sum of parts.
struct RowPart {
  RowState state = kEmptyRow;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds a part, whose row max is at most that of the sum.
  __device__ void add(const RowState& part, const float4& part_out) {
    const float weight = weight_of(part, state.row_max);
    state.row_sum += part.row_sum * weight;
    out.x += weight * part_out.x;
    out.y += weight * part_out.y;
    out.z += weight * part_out.z;
    out.w += weight * part_out.w;
  }
};

// Combines the first `count` of kCount parts, at least one; `out_of(i)` is partial O of part i. The
// row max is that of all states.
template <int kCount, typename OutOf>
__device__ inline RowPart combine_parts(const RowState (&states)[kCount], int count, OutOf out_of) {
  RowPart total;
  total.state.row_max = max_of(states);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i == 0 || i < count) total.add(states[i], out_of(i));
  }
  return total;
}
