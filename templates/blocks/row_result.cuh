// How the statistics of a softmax row become its scale and its LSE. Needs ptx/ex2.cuh.

struct RowResult {
  float factor;  // multiplies the accumulated values
  float lse;  // log2 of the sum of 2^score, the sink included; minus infinity for an empty row
};

// `reference` in log2 units, `sum` relative to it; `sink` is a natural-log logit without a value,
// or minus infinity. A row that saw nothing is zero, sink or not.
__device__ inline RowResult finish_row(float reference, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, -kInfinity};  // a NaN is not nothing
  const float sink_log2 = sink * kLog2E;
  // Relative to the larger of the two, because 2^(sink - reference) may overflow.
  const float larger = fmaxf(reference, sink_log2);
  const float rescale = ex2_approx(reference - larger);
  const float total = sum * rescale + ex2_approx(sink_log2 - larger);
  // Approximate: exact to some 22 bits, and a fraction of the instructions.
  return {__fdividef(rescale, total), larger + __log2f(total)};
}
