// Dequantization of a KV block, from the stage that it was loaded into.

#pragma once

#include "common/exact_bf16.cuh"
#include "common/fp8.cuh"
#include "common/packed_row.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load.cuh"
#include "work_item.cuh"

__device__ inline Chunk* dequant_chunk(unsigned char* tokens, int token, int chunk) {
  return reinterpret_cast<Chunk*>(tokens + swizzled_offset<kTokenBytes>(token, chunk));
}

// Scale of 16 e4m3 elements of a token; `chunk` counts such groups.
__device__ inline float chunk_scale(const Params& params, const unsigned char* row, int chunk) {
  constexpr int kScaleChunks = kHasPackedRows ? KvRow::kGroup / 16 : 8;
  const int index = kScales == 1 ? 0 : chunk / kScaleChunks;
  if constexpr (KvRow::kHasInlineScales) {
    return reinterpret_cast<const float*>(row + KvRow::kCodeBytes)[index];
  } else {
    if (!kHasPackedRows && chunk >= kLatentDim / 16) return params.rope_scale;
    if (params.kv_scales == nullptr) return kHasPackedRows ? 1.0f : params.latent_scale;
    return reinterpret_cast<const float*>(row + kStoredBytes)[index];
  }
}

// Row of a token of two pools, eight lanes together.
template <typename Row>
__device__ inline void dequant_pooled_row(const unsigned char* row, unsigned char* tokens,
                                          int token) {
  constexpr int kCodeChunks = Row::kCodeBytes / kChunkBytes;
  constexpr bool kIsE4m3 = kIsSame<typename Row::Code, E4m3>;
  const unsigned char* scales = row + (Row::kHasInlineScales ? Row::kCodeBytes : Row::kDataBytes);
  const int lane = lane_index() % 8;
#pragma unroll
  for (int first = 0; first < kCodeChunks; first += 8) {
    const int chunk = first + lane;
    if (kCodeChunks % 8 != 0 && chunk >= kCodeChunks) continue;
    const unsigned char* codes = row + chunk * kChunkBytes;
    // Sixteen codes are two dequantized chunks.
#pragma unroll
    for (int part = 0; part < Row::kElementsPerChunk / 16; ++part) {
      const int group = (chunk * Row::kElementsPerChunk + part * 16) / Row::kGroup;
      const u32 scale = bf16x2_of_scale(typename Row::ScaleCode{}, scales + group);
      Chunk dequantized[2];
      if constexpr (kIsE4m3) {
        dequant_exactly(E4m3{}, *reinterpret_cast<const Chunk*>(codes), scale, dequantized);
      } else {
        dequant_exactly(E2m1{}, reinterpret_cast<const uint2*>(codes)[part], scale, dequantized);
      }
      // Lanes 4 to 7 store in reverse order: otherwise two lanes would meet in a bank.
      const int target = chunk * (Row::kElementsPerChunk / 8) + part * 2;
      const bool is_reverse = lane >= 4;
      *dequant_chunk(tokens, token, target + is_reverse) =
          is_reverse ? dequantized[1] : dequantized[0];
      *dequant_chunk(tokens, token, target + !is_reverse) =
          is_reverse ? dequantized[0] : dequantized[1];
    }
  }
  if constexpr (Row::kBf16Elements > 0) {
    const Chunk* bf16 = reinterpret_cast<const Chunk*>(row + Row::kBf16Offset);
    *dequant_chunk(tokens, token, Row::kScaledElements / kChunkElements + lane) = bf16[lane];
  }
}

// Dequantizes one KV block, eight lanes a token. Tokens that were not loaded are zero and stay
// zero.
__device__ inline void dequant_tokens(const Params& params, const KvLoader& loader, int stage_idx,
                                      SharedMemoryPlan& smem) {
  constexpr int kFp8Chunks = (kHasBf16Rope ? kLatentDim : kHeadDimQk) / 16;
  constexpr bool kIsScaled = kScales > 0;
  const int lane = lane_index() % 8;
  unsigned char* tokens = tokens_of(smem, stage_idx);
#pragma unroll 1
  for (int token = static_cast<int>(threadIdx.x) / 8; token < kBlockN; token += kRoundTokens) {
    const unsigned char* row = stage_ptr(smem, stage_idx) + token * kStageRowBytes;
    if constexpr (kHasTwoPools) {
      if (!kIsSame<KvRow, ExtraKvRow> && loader.pooled.is_extra(stage_idx * kBlockN + token)) {
        dequant_pooled_row<ExtraKvRow>(row, tokens, token);
      } else {
        dequant_pooled_row<KvRow>(row, tokens, token);
      }
      continue;
    }
#pragma unroll
    for (int first = 0; first < kFp8Chunks; first += 8) {
      const int chunk = first + lane;
      if (kFp8Chunks % 8 != 0 && chunk >= kFp8Chunks) continue;
      const Chunk stored = *reinterpret_cast<const Chunk*>(row + chunk * kChunkBytes);
      Chunk dequantized[2];
      if constexpr (kIsScaled) {
        dequant_e4m3(Element{}, stored, chunk_scale(params, row, chunk), dequantized);
      } else {
        dequant_e4m3(Element{}, stored, dequantized);
      }
      *dequant_chunk(tokens, token, chunk * 2) = dequantized[0];
      *dequant_chunk(tokens, token, chunk * 2 + 1) = dequantized[1];
    }
    if constexpr (kHasBf16Rope) {
      const unsigned char* rope = row + KvRow::kBf16Offset;
      const Chunk stored = *reinterpret_cast<const Chunk*>(rope + lane * kChunkBytes);
      const float scale = KvRow::kScalesBf16 ? chunk_scale(params, row, 0) : 1.0f;
      *dequant_chunk(tokens, token, kLatentDim / kChunkElements + lane) =
          scale_bf16(Element{}, stored, scale);
    }
  }
}
