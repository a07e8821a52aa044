// Finite elements of V in e4m3, which has no Inf; a NaN has every bit but the sign set. Masked V is
// cleared of NaN before the PV GEMM: its probability is 0, but 0 * NaN is NaN.

#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"
#include "ptx/cvt.cuh"

__device__ inline bool is_finite(u32 element) { return (element & 0x7f) != 0x7f; }

__device__ inline float value_of_element(u16 element) {
  return cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(element)));
}
