// Q loads: copies the query rows of a work item into swizzled shared memory by cp.async.

#pragma once

#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/query_row.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// Issues the copies of all rows, by `threads` threads of which this is number `thread`. A row's
// tiles lie kQueryTileBytes apart; eight lanes copy the 128 bytes of a row of one tile.
__device__ inline void load_q_async(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread, int threads) {
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += threads / 8) {
    const bool is_row = row < coord.rows;
    const auto [query, head] = query_row(params, coord, row, is_row);
    const unsigned char* latent = params.query + query * params.query_stride +
                                  head * params.query_head_stride + lane * kChunkBytes;
    const unsigned char* rope = params.query_rope + query * params.query_rope_stride +
                                head * params.query_rope_head_stride + lane * kChunkBytes;
    const u32 target = shared_address(smem.query) + swizzled_offset<kTileRowBytes>(row, lane);
    const u32 bytes = is_row ? kChunkBytes : 0;  // zero-fills padding
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      cp_async_cg_16(target + tile * kQueryTileBytes,
                     tile < kLatentTiles ? latent + tile * kTileRowBytes : rope, bytes);
    }
  }
  cp_async_commit_group();
}
