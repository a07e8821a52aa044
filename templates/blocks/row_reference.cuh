// What both families' online softmax does with a row, of which four neighbouring lanes hold a part
// each. Needs blocks/prelude.cuh.

// A row's probabilities are relative to its reference, which is kept until a score exceeds it by
// this much in log2 units. So warps need not agree on a maximum for every tile, the output is
// rescaled seldom, and no probability exceeds 2^8, which fp16 holds.
constexpr float kReferenceSlack = 8.0f;

__device__ inline float row_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float row_total(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}
