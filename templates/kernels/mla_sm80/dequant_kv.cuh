// Dequantisation of a KV tile: from stored FP8 to the element type of the MMA.

#pragma once

#include "common/fp8.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load_kv.cuh"
#include "shared_memory.cuh"

__device__ inline Chunk* decoded_chunk(unsigned char* tokens, int token, int chunk) {
  return reinterpret_cast<Chunk*>(tokens + swizzled_offset<kTokenBytes>(token, chunk));
}

// Scale of 16 e4m3 elements of a token; `chunk` counts such groups.
__device__ inline float chunk_scale(const Params& params, const unsigned char* row, int chunk) {
  const bool is_rope = chunk >= kLatentDim / 16;
  if constexpr (kIsSame<StoredToken, Fp8DsMla>) {
    return reinterpret_cast<const float*>(row + kLatentDim)[chunk / 8];
  } else if constexpr (kIsSame<StoredToken, Fp8PerToken>) {
    return params.kv_scales == nullptr ? 1.0f : *reinterpret_cast<const float*>(row + kStoredBytes);
  } else {
    if (is_rope) return params.rope_scale;
    if (params.kv_scales == nullptr) return params.latent_scale;
    return reinterpret_cast<const float*>(row + kStoredBytes)[chunk / 8];
  }
}

// Dequantises one tile, eight lanes a token. Tokens that were not loaded are zero and stay zero.
__device__ inline void dequant_tokens(const Params& params, int stage_idx, SharedMemoryPlan& smem) {
  constexpr int kFp8Chunks = (kHasBf16Rope ? kLatentDim : kHeadDimQk) / 16;
  constexpr bool kIsScaled = !kIsSame<StoredQuery, E4m3>;
  const int lane = lane_index() % 8;
  unsigned char* tokens = tokens_of(smem, stage_idx);
#pragma unroll 1
  for (int token = static_cast<int>(threadIdx.x) / 8; token < kBlockN; token += kRoundTokens) {
    const unsigned char* row = stage_of(smem, stage_idx) + token * kStageRowBytes;
#pragma unroll
    for (int first = 0; first < kFp8Chunks; first += 8) {
      const int chunk = first + lane;
      if (kFp8Chunks % 8 != 0 && chunk >= kFp8Chunks) continue;
      const Chunk stored = *reinterpret_cast<const Chunk*>(row + chunk * kChunkBytes);
      Chunk decoded[2];
      if constexpr (kIsScaled) {
        decode_e4m3(Element{}, stored, chunk_scale(params, row, chunk), decoded);
      } else {
        decode_e4m3(Element{}, stored, decoded);
      }
      *decoded_chunk(tokens, token, chunk * 2) = decoded[0];
      *decoded_chunk(tokens, token, chunk * 2 + 1) = decoded[1];
    }
    if constexpr (kHasBf16Rope) {
      constexpr int kRopeOffset = kStoredBytes - kRopeDim * 2;
      const Chunk stored = *reinterpret_cast<const Chunk*>(row + kRopeOffset + lane * kChunkBytes);
      const float scale = kIsSame<StoredToken, Fp8PerToken> ? chunk_scale(params, row, 0) : 1.0f;
      *decoded_chunk(tokens, token, kLatentDim / kChunkElements + lane) =
          decode_bf16(Element{}, stored, scale);
    }
  }
}
