// Finite tests of fp16 and bf16 elements.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"

constexpr u32 kExponentBits = kIsSame<Element, Bf16> ? 0x7f80 : 0x7c00;

__device__ inline bool is_finite(u32 element) { return (element & kExponentBits) != kExponentBits; }

__device__ inline float value_of_element(u16 element) { return cvt_f32(Element{}, element); }

__device__ inline u32 finite_pair(u32 pair) {
  return (is_finite(pair) ? pair & 0xffff : 0) | (is_finite(pair >> 16) ? pair & 0xffff0000 : 0);
}
