// Q load: copies the query rows of a work item into swizzled shared memory by cp.async.

#pragma once

#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

struct QueryRow {
  i64 query;  // index of the query token in the query tensor
  int head;
};

// Padding, where `is_row` is false, maps to a row that exists, so that its address is valid.
__device__ inline QueryRow query_row(const Params& params, const WorkCoord& coord, int row,
                                     bool is_row) {
  const u32 packed_row = is_row ? coord.first_row + row : 0;
  const u32 heads = params.heads;
  // Most tiles have one query token; the branch avoids an integer division.
  const u32 token = kIsSparse || packed_row < heads ? 0 : packed_row / heads;
  return {is_row ? coord.first_query + token : 0, static_cast<int>(packed_row - token * heads)};
}

// Issues the copies of all rows, by `threads` threads of which this is number `thread`. The latent
// tiles of a row lie kQueryTileBytes apart, before the rope tile; eight lanes copy 128 bytes.
// `begin_row` takes each row, its query token and the rank of the lane, while the copies of the
// latent part are in flight. `target_of(target, row, tile)` is where a row of latent tile 0 goes in
// another one, without the distance between tiles; `target` is that of equal rows.
template <typename BeginRow, typename TargetOf>
__device__ inline void load_q_async(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread, int threads,
                                    BeginRow begin_row, TargetOf target_of) {
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += threads / 8) {
    const bool is_row = row < coord.rows;
    const auto [query, head] = query_row(params, coord, row, is_row);
    const unsigned char* latent = params.query + query * params.query_stride +
                                  head * params.query_head_stride + lane * kChunkBytes;
    const u32 target = shared_address(smem.query);
    const u32 latent_target = target + swizzled_offset<kTileRowBytes>(row, lane);
    const u32 bytes = is_row ? kChunkBytes : 0;  // zero-fills padding
#pragma unroll
    for (int tile = 0; tile < kLatentTiles; ++tile) {
      cp_async_cg_16(target_of(latent_target, row, tile) + tile * kQueryTileBytes,
                     latent + tile * kTileRowBytes, bytes);
    }
    begin_row(row, is_row, query, lane);
    if constexpr (kQueryRopeBytes == 0) continue;
    if (kQueryRopeBytes < kTileRowBytes && lane >= kQueryRopeBytes / kChunkBytes) continue;
    const unsigned char* rope = params.query_rope + query * params.query_rope_stride +
                                head * params.query_rope_head_stride + lane * kChunkBytes;
    cp_async_cg_16(
        target + kLatentTiles * kQueryTileBytes + swizzled_offset<kQueryRopeRowBytes>(row, lane),
        rope, bytes);
  }
  cp_async_commit_group();
}

template <typename BeginRow>
__device__ inline void load_q_async(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread, int threads,
                                    BeginRow begin_row) {
  load_q_async(params, coord, smem, thread, threads, begin_row,
               [](u32 target, int, int) { return target; });
}

__device__ inline void load_q_async(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread, int threads) {
  load_q_async(params, coord, smem, thread, threads, [](int, bool, i64, int) {});
}
