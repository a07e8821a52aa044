// Load and dequantisation of an FP8 Q row.

#pragma once

#include "common/fp8.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "q_rows.cuh"
#include "shared_memory.cuh"

// In FP8 rows with a bf16 rope part, the scale of the query token applies to both parts.
constexpr bool kHasBf16QRope = kIsSame<StoredQuery, Fp8PerToken>;

__device__ inline void load_query_row(const Params& params, i64 query, int head, int row, int lane,
                                      SharedMemoryPlan& smem) {
  const Chunk* latent = reinterpret_cast<const Chunk*>(latent_q(params, query, head));
  const Chunk* rope = reinterpret_cast<const Chunk*>(rope_q(params, query, head));
  const float scale = params.query_scales == nullptr ? 1.0f : params.query_scales[query];
  constexpr int kLatentChunks = kLatentDim / 16;
  for (int chunk = lane; chunk < (kHasBf16QRope ? kLatentDim : kHeadDimQk) / 16; chunk += 8) {
    Chunk decoded[2];
    const Chunk stored = chunk < kLatentChunks ? latent[chunk] : rope[chunk - kLatentChunks];
    if constexpr (kHasBf16QRope) {
      decode_e4m3(Element{}, stored, scale, decoded);
    } else {
      decode_e4m3(Element{}, stored, decoded);
    }
    *query_chunk(smem, row, chunk * 2) = decoded[0];
    *query_chunk(smem, row, chunk * 2 + 1) = decoded[1];
  }
  if constexpr (kHasBf16QRope) {
    *query_chunk(smem, row, kLatentDim / kChunkElements + lane) =
        decode_bf16(Element{}, rope[lane], scale);
  }
}
