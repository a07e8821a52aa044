// Dequantisation of an int8 KV cache; it has no per-token scales.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "work_tile.cuh"

struct TokenScales {};

__device__ inline void dequant_elements(const unsigned char* row, const TokenScales&, int,
                                        int scale_group, Chunk (&decoded)[2]) {
  const Chunk stored = reinterpret_cast<const Chunk*>(row)[scale_group];
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const int bytes = static_cast<int>(stored.words[pair / 2]) >> pair % 2 * 16;
    const float low = static_cast<float>(static_cast<signed char>(bytes));
    const float high = static_cast<float>(static_cast<signed char>(bytes >> 8));
    decoded[pair / 4].words[pair % 4] = cvt_rn_x2_f32(Element{}, high, low);
  }
}

__device__ inline TokenScales scales_of(const Params&, const Work&, int, int, const int*) {
  return {};
}
