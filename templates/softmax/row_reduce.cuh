// Reductions over the four neighbouring lanes that have a row's parts, as products leave them.

#pragma once

__device__ inline float row_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float row_minimum(float value) {
  value = fminf(value, __shfl_xor_sync(~0u, value, 1));
  return fminf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float row_total(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}
