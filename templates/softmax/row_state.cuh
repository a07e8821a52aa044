// Softmax state (m, l) of a row: combination of the parts that splits or warps have of it, final
// normalization factor and LSE, attention sink included.

#pragma once

#include "common/types.cuh"
#include "ptx/arithmetic.cuh"

// Softmax state (m, l) of a row, or of a part of it.
struct RowState {
  float row_max;  // base 2; O and row sum are relative to it
  float row_sum;  // of P
};

struct RowResult {
  float factor;  // multiplies the accumulators
  float lse;  // includes the sink; an empty row has its sink, or minus infinity
};

// `row_max` is base 2, `row_sum` is relative to it; `sink` is a natural-log logit without a V row,
// or minus infinity. `lse_factor` converts base 2 to the base of the LSE.
__device__ inline RowResult finish_row(float row_max, float row_sum, float sink,
                                       float lse_factor = 1.0f) {
  // Computed in base e: a finite sink may overflow in base 2.
  const float sink_lse = sink * (kLog2E * lse_factor);
  // Fused, so that only the distance can overflow, to an infinity of the right sign.
  const float distance = fmaf(sink, kLog2E, -row_max);
  // Relative to the larger of the two, because 2^distance may overflow. Selects keep a NaN, and no
  // branch scatters code that runs once over instruction-cache lines.
  const bool is_sink_larger = distance > 0.0f;
  const float smaller = ex2_approx(-fabsf(distance));
  const float rescale = is_sink_larger ? smaller : 1.0f;
  const float total = row_sum * rescale + (is_sink_larger ? 1.0f : smaller);
  // Approximate, to about 22 bits, with a fraction of the instructions.
  const float log2_total = __log2f(total);
  const bool is_empty = row_sum == 0.0f;  // the row attends to nothing; a NaN is not nothing
  const float lse =
      is_sink_larger ? sink_lse + log2_total * lse_factor : (row_max + log2_total) * lse_factor;
  return {is_empty ? 0.0f : __fdividef(rescale, total), is_empty ? sink_lse : lse};
}

// The same without a sink.
__device__ inline RowResult finish_row_without_sink(float row_max, float row_sum,
                                                    float lse_factor = 1.0f) {
  if (row_sum == 0.0f) return {0.0f, -kInfinity};
  return {__fdividef(1.0f, row_sum), (row_max + __log2f(row_sum)) * lse_factor};
}

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
