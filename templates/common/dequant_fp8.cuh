// FP8 dequantisation: stored e4m3 to the element type of the MMA.

#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"
#include "ptx/cvt.cuh"

// Converts pair `pair` of 16 elements to fp16.
__device__ inline u32 decode_pair(const Chunk& stored, int pair) {
  const u32 word = stored.words[pair / 2];
  return pair % 2 == 0 ? fp16x2_of_e4m3x2(word & 0xffff) : fp16x2_of_high_e4m3x2(word);
}

// Sixteen elements times `scale`, with one rounding.
template <typename Target>
__device__ inline void decode_e4m3(Target target, const Chunk& stored, float scale,
                                   Chunk (&decoded)[2]) {
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 fp16x2 = decode_pair(stored, pair);
    const float low = cvt_f32(Fp16{}, static_cast<u16>(fp16x2));
    const float high = cvt_f32(Fp16{}, static_cast<u16>(fp16x2 >> 16));
    decoded[pair / 4].words[pair % 4] = cvt_rn_x2_f32(target, high * scale, low * scale);
  }
}

// Sixteen elements unscaled: fp16 and bf16 both represent every e4m3 value.
template <typename Target>
__device__ inline void decode_e4m3(Target target, const Chunk& stored, Chunk (&decoded)[2]) {
  if constexpr (kIsSame<Target, Fp16>) {
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      decoded[pair / 4].words[pair % 4] = decode_pair(stored, pair);
    }
  } else {
    decode_e4m3(target, stored, 1.0f, decoded);
  }
}

// Eight bf16 elements times `scale`.
template <typename Target>
__device__ inline Chunk decode_bf16(Target target, const Chunk& stored, float scale) {
  Chunk decoded;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float low = cvt_f32(Bf16{}, static_cast<u16>(stored.words[word]));
    const float high = cvt_f32(Bf16{}, static_cast<u16>(stored.words[word] >> 16));
    decoded.words[word] = cvt_rn_x2_f32(target, high * scale, low * scale);
  }
  return decoded;
}
