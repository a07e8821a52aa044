// Q load: the FP8 query rows of a work item, by cp.async.

#pragma once

#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/query_row.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// Called by `threads` threads; eight lanes copy a row, 128 bytes at a time. Only issues the copies.
__device__ inline void load_q_async(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread, int threads) {
  const int lane = thread % 8;
  const u32 target = shared_address(smem.query);
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += threads / 8) {
    const bool is_row = row < coord.rows;
    const auto [query, head] = query_row(params, coord, row, is_row);
    const unsigned char* latent = params.query + query * params.query_stride +
                                  head * params.query_head_stride + lane * kChunkBytes;
    const u32 latent_target = target + swizzled_offset<kTileRowBytes>(row, lane);
    const u32 bytes = is_row ? kChunkBytes : 0;  // zero-fills padding rows
#pragma unroll
    for (int tile = 0; tile < kLatentTiles; ++tile) {
      cp_async_cg_16(latent_target + tile * kQueryTileBytes, latent + tile * kTileRowBytes, bytes);
    }
    if (lane >= kRopeRowBytes / kChunkBytes) continue;
    const unsigned char* rope = params.query_rope + query * params.query_rope_stride +
                                head * params.query_rope_head_stride + lane * kChunkBytes;
    cp_async_cg_16(
        target + kLatentTiles * kQueryTileBytes + swizzled_offset<kRopeRowBytes>(row, lane), rope,
        bytes);
  }
  cp_async_commit_group();
}
