// Powers of two as floats. Needs blocks/prelude.cuh.

// Both are normal numbers.
__device__ inline float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}
