// Output gate of a sparse call: a 16-bit output times the sigmoid of a number for each element.

#pragma once

#include "common/types.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "ptx/load.cuh"

__device__ inline float sigmoid(float value) {
  return rcp_approx(1.0f + ex2_approx(value * -kLog2E));
}

// Prefetches the gates of `count` elements from `offset` on into L2, by thread `thread` of more
// threads than they have cache lines.
template <typename GateParams>
__device__ inline void prefetch_gates(const GateParams& params, i64 offset, int count, int thread) {
  constexpr int kGatesPerCacheLine = 64;
  if (thread * kGatesPerCacheLine >= count) return;
  prefetch_l2(params.output_gate + offset + thread * kGatesPerCacheLine);
}

// Gates four elements of the output, from `offset` on. The output is rounded before, as by a caller
// that multiplies it himself. A template: Params of a kernel without a gate lacks it.
template <typename Element16, typename GateParams>
__device__ inline float4 gated_output(Element16, const GateParams& params, i64 offset,
                                      float4 value) {
  const uint2 gates = *reinterpret_cast<const uint2*>(params.output_gate + offset);
  const u32 low = cvt_rn_x2_f32(Element16{}, value.y, value.x);
  const u32 high = cvt_rn_x2_f32(Element16{}, value.w, value.z);
  const auto gated = [](u32 rounded, u32 gate) {
    return cvt_f32(Element16{}, static_cast<u16>(rounded)) *
           sigmoid(cvt_f32(Element16{}, static_cast<u16>(gate)));
  };
  return make_float4(gated(low, gates.x), gated(low >> 16, gates.x >> 16), gated(high, gates.y),
                     gated(high >> 16, gates.y >> 16));
}
