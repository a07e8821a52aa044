// Values that some row of a tile must not see: 0 * NaN is NaN, so a NaN must not meet the tensor
// cores, though its weight is 0. Of a NaN all bits are set but the sign.

#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"
#include "ptx/cvt.cuh"

__device__ inline bool is_finite(u32 element) { return (element & 0x7f) != 0x7f; }

__device__ inline float value_of_element(u16 element) {
  return cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(element)));
}
