// Vectorised store of four output elements in e4m3, from float.

#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"

// `index` counts elements and is a multiple of 4.
__device__ inline void store_x4(E4m3, unsigned char* out, i64 index, float a, float b, float c,
                                float d) {
  *reinterpret_cast<u32*>(out + index) = e4m3x2_of_f32(b, a) | e4m3x2_of_f32(d, c) << 16;
}
