// Vectorised store of four output elements in fp16 or bf16, from float.

#pragma once

#include "common/types.cuh"
#include "ptx/cvt.cuh"

// `index` counts elements and is a multiple of 4.
template <typename Target>
__device__ inline void store_x4(Target target, unsigned char* out, i64 index, float a, float b,
                                float c, float d) {
  uint2 packed;
  packed.x = cvt_rn_x2_f32(target, b, a);
  packed.y = cvt_rn_x2_f32(target, d, c);
  *reinterpret_cast<uint2*>(out + index * 2) = packed;
}
