// Quad reductions: the four adjacent lanes that hold a row of an MMA accumulator.

#pragma once

__device__ inline float quad_reduce_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_reduce_min(float value) {
  value = fminf(value, __shfl_xor_sync(~0u, value, 1));
  return fminf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_reduce_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}
