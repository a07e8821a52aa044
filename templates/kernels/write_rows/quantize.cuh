// Quantization of a group of elements, which some lanes hold: its scale, and its codes.

#pragma once

#include "common/fp8.cuh"
#include "common/packed_row.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "elements.cuh"
#include "ptx/cvt.cuh"

// A scale as it is stored, and its value: NaN is stored, if the group is not finite.
struct GroupScale {
  u32 stored;
  float value;
  u32 amax_bits;  // above infinity's if the group has a NaN

  __device__ bool is_finite() const { return amax_bits < kInfinityBits; }
};

__device__ inline void store_scale(Fp32, float scale, bool is_finite, GroupScale& group) {
  group.value = is_finite ? scale : __uint_as_float(0x7fc00000);
  group.stored = __float_as_uint(group.value);
}

// Rounds up to a power of two.
__device__ inline void store_scale(Ue8m0, float scale, bool is_finite, GroupScale& group) {
  const u32 bits = __float_as_uint(scale);
  const u32 exponent = (bits >> 23) + ((bits & 0x7fffff) != 0 ? 1 : 0);
  group.value = __uint_as_float(exponent << 23);
  group.stored = is_finite ? exponent : 0xff;
}

__device__ inline void store_scale(E4m3, float scale, bool is_finite, GroupScale& group) {
  const u32 code = e4m3x2_of_f32(0.0f, scale) & 0xff;
  group.value = cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(code)));
  group.stored = is_finite ? code : 0x7f;
}

// The scale of the group that this lane has elements of.
__device__ inline GroupScale scale_of(const float (&values)[kLaneElements]) {
  u32 amax = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const u32 magnitude = __float_as_uint(values[i]) & kMagnitude;
    amax = amax > magnitude ? amax : magnitude;
  }
#pragma unroll
  for (int lanes = kGroupLanes / 2; lanes > 0; lanes /= 2) {
    const u32 other = __shfl_xor_sync(~0u, amax, lanes);
    amax = amax > other ? amax : other;
  }
  GroupScale group;
  group.amax_bits = amax;
  const bool is_finite = group.is_finite();
  constexpr float kCodeMax = KvRow::kCodeBits == 4 ? 6.0f : 448.0f;
  const float raw = is_finite ? __uint_as_float(amax) / kCodeMax : 1.0f;
  store_scale(KvRow::ScaleCode{}, fmaxf(raw, kMinScale), is_finite, group);
  return group;
}

template <typename ScaleCode>
__device__ inline float quotient(ScaleCode, float value, float scale) {
  return value / scale;
}

// Exact, as the scale is a power of two, and neither is its reciprocal subnormal.
__device__ inline float quotient(Ue8m0, float value, float scale) {
  return value * __uint_as_float((254u << 23) - __float_as_uint(scale));
}

// NaN of a group with NaN, and of infinities; zeros, with their signs, beside infinities.
__device__ inline float nonfinite_quotient(float value, const GroupScale& group) {
  const u32 bits = __float_as_uint(value);
  const bool is_nan = group.amax_bits > kInfinityBits || (bits & kMagnitude) == kInfinityBits;
  return __uint_as_float(is_nan ? kMagnitude : bits & ~kMagnitude);
}

__device__ inline void store_codes(E4m3, unsigned char* codes, const float (&values)[kLaneElements],
                                   const GroupScale& group) {
  float quotients[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    quotients[i] = group.is_finite() ? quotient(KvRow::ScaleCode{}, values[i], group.value)
                                     : nonfinite_quotient(values[i], group);
  }
  Chunk chunk;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float* of_word = quotients + word * 4;
    chunk.words[word] =
        e4m3x2_of_f32(of_word[1], of_word[0]) | e4m3x2_of_f32(of_word[3], of_word[2]) << 16;
  }
  *reinterpret_cast<Chunk*>(codes) = chunk;
}

// The code nearest to a quotient, in a tie the even one, without the quotient: it rounds to a tie
// only if it is one, as value and scale have 11 and 4 bits, and the products are exact.
__device__ inline u32 e2m1_of_quotient(float value, float scale) {
  const float size = fabsf(value);
  const u32 magnitude = (size > 0.25f * scale) + (size >= 0.75f * scale) + (size > 1.25f * scale) +
                        (size >= 1.75f * scale) + (size > 2.5f * scale) + (size >= 3.5f * scale) +
                        (size > 5.0f * scale);
  return magnitude | (__float_as_uint(value) >> 28 & 8);
}

__device__ inline void store_codes(E2m1, unsigned char* codes, const float (&values)[kLaneElements],
                                   const GroupScale& group) {
  u32 words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    const u32 code = group.is_finite() ? e2m1_of_quotient(values[i], group.value) : 0;
    words[i / 8] |= code << (i % 8 * 4);
  }
  *reinterpret_cast<uint2*>(codes) = make_uint2(words[0], words[1]);
}
