// Exact dequantization to bf16: e4m3 codes times a power of two, and e2m1 codes times an e4m3
// scale. Bits of a code, read as those of a bf16, are its value times a power of two, subnormals
// included; products are exact as long as they are normal numbers. Conversions by way of fp32 take
// longer.

#pragma once

#include "common/fp8.cuh"
#include "common/packed_row.cuh"
#include "common/types.cuh"
#include "ptx/arithmetic.cuh"

__device__ inline u32 mul_bf16x2(u32 a, u32 b) {
  constexpr u32 kMinusZeros = 0x80008000;  // keeps the sign of a zero product
  return fma_bf16x2(a, b, kMinusZeros);
}

// The same bf16 twice.
__device__ constexpr u32 bf16x2_of_bits(u32 bits) { return bits * 0x10001; }

// Two e4m3 in the upper bytes of their halves; a NaN reads as 480.
__device__ inline u32 bf16x2_of_spread_e4m3(u32 spread) {
  constexpr u32 kTwoTo120 = bf16x2_of_bits((120 + 127) << 7);
  return mul_bf16x2((spread & 0x80008000) | (spread >> 4 & 0x07f007f0), kTwoTo120);
}

// Pair `pair` of the four e4m3 in a word; a NaN reads as 480.
__device__ inline u32 bf16x2_of_e4m3(u32 word, int pair) {
  return bf16x2_of_spread_e4m3(__byte_perm(word, 0, pair == 0 ? 0x1404 : 0x3424));
}

// NaN where the pair has one, else zero bits.
__device__ inline u32 nan_bf16x2_of_e4m3(u32 word, int pair) {
  return __byte_perm(nan_bytes(word), 0, pair == 0 ? 0x1100 : 0x3322) & 0x7fff7fff;
}

// Two e2m1 in the low byte of a word.
__device__ inline u32 bf16x2_of_e2m1(u32 byte) {
  constexpr u32 kTwoTo126 = bf16x2_of_bits((126 + 127) << 7);
  const u32 low = (byte & 0x8) << 12 | (byte & 0x7) << 6;
  const u32 high = (byte & 0x80) << 24 | (byte & 0x70) << 18;
  return mul_bf16x2(low | high, kTwoTo126);
}

// The scale of a group, twice. 2^-127 reads as zero.
__device__ inline u32 bf16x2_of_scale(Ue8m0, const unsigned char* scale) {
  const u32 exponent = *scale;
  const u32 nan = (exponent + 1) >> 2 & 0x40;  // of 255, which else is infinity
  return bf16x2_of_bits(exponent << 7 | nan);
}

__device__ inline u32 bf16x2_of_scale(E4m3, const unsigned char* scale) {
  const u32 twice = *scale * 0x101;
  return bf16x2_of_e4m3(twice, 0) | nan_bf16x2_of_e4m3(twice, 0);
}

// Sixteen e4m3 codes of one scale, into two chunks.
__device__ inline void dequant_exactly(E4m3, const Chunk& stored, u32 scale, Chunk* dequantized) {
  u32 nan = 0;
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 word = stored.words[pair / 2];
    nan |= (word & 0x7f7f7f7f) + 0x01010101;
    dequantized[pair / 4].words[pair % 4] = mul_bf16x2(bf16x2_of_e4m3(word, pair % 2), scale);
  }
  if ((nan & 0x80808080) == 0) return;
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    dequantized[pair / 4].words[pair % 4] |= nan_bf16x2_of_e4m3(stored.words[pair / 2], pair % 2);
  }
}

// Sixteen e2m1 codes of one scale, into two chunks.
__device__ inline void dequant_exactly(E2m1, uint2 stored, u32 scale, Chunk* dequantized) {
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 byte = (pair < 4 ? stored.x : stored.y) >> pair % 4 * 8;
    dequantized[pair / 4].words[pair % 4] = mul_bf16x2(bf16x2_of_e2m1(byte), scale);
  }
}
