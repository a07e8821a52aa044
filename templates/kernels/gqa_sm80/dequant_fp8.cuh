// Dequantisation of an FP8 (e4m3) KV cache; it has no per-token scales.

#pragma once

#include "common/fp8.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "work_tile.cuh"

struct TokenScales {};

__device__ inline void dequant_elements(const unsigned char* row, const TokenScales&, int,
                                        int scale_group, Chunk (&decoded)[2]) {
  decode_e4m3(Element{}, reinterpret_cast<const Chunk*>(row)[scale_group], decoded);
}

__device__ inline TokenScales scales_of(const Params&, const Work&, int, int, const int*) {
  return {};
}
