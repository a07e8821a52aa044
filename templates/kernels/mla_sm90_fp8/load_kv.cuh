// KV producer warp: loads the KV blocks of all work items by TMA, one pipeline stage per KV block.

#pragma once

#include "common/barriers.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/kv_tma.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/sync.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/throttle.cuh"
#include "shared_memory.cuh"

// Issuing a TMA copy takes hundreds of cycles beside MMAs. So the latent part of a KV block that
// lies in one page is one copy, and otherwise each lane copies one tile.
__device__ inline void copy_kv_block(const Params& params, const KvTileBoxes& boxes, u32 target,
                                     u32 full, u64 cache_hint) {
  const int lane = lane_index();
  if (lane == 0) mbarrier_arrive_expect_tx(full, boxes.num_boxes * kBoxTokens * kHeadDimQk);
  __syncwarp();
  if constexpr (kBoxes == 1) {
    if (lane == 0) {
      cp_async_bulk_tensor(target, &params.kv_map, full, cache_hint, 0, boxes.slot[0], 0,
                           boxes.page[0]);
      if constexpr (kRopeDim > 0) {
        cp_async_bulk_tensor(target + kLatentTiles * kTileBytes, &params.rope_map, full, cache_hint,
                             0, boxes.slot[0], 0, boxes.page[0]);
      }
    }
  } else if (lane < kTiles) {
    const bool is_rope = lane == kLatentTiles;
    boxes.copy_tile(is_rope ? &params.rope_map : &params.latent_map, is_rope ? 0 : lane,
                    target + lane * kTileBytes, full, cache_hint,
                    is_rope ? kRopeRowBytes : kTileRowBytes);
  }
  __syncwarp();
}

// `coord` is the first work item. While a CTA of a CTA group fills its stages, it waits for its
// first KV block before it requests more, and then has at most two in flight: otherwise the first
// loads of the last CTA queue behind all loads of the others.
__device__ inline void producer_loop(const Params& params, int, WorkCoord coord,
                                     SharedMemoryPlan& smem) {
  const u64 cache_hint = kv_cache_hint(params.cta_group_size);
  CtaThrottle throttle(params, smem.scheduler_storage.range);
  PipelineState<kStages> pipe;
  bool limits_loads = params.cta_group_size > 1;
  for (u32 work_idx = 0; coord.seq_idx >= 0; coord = next_work_coord(smem, work_idx)) {
    const int end = coord.first_kv_block + coord.num_kv_blocks;
    BlockTableReader block_table(params, coord);
#pragma unroll 1
    for (int kv_block = coord.first_kv_block; kv_block < end; ++kv_block) {
      const KvTileBoxes boxes(block_table, kv_block, coord.kv_end);
      wait(smem.kv_empty[pipe.index], pipe.phase ^ 1);
      throttle.wait();
      copy_kv_block(params, boxes, shared_address(smem.kv[pipe.index]),
                    shared_address(&smem.kv_full[pipe.index]), cache_hint);
      if (limits_loads) wait(smem.kv_full[max(pipe.index - 1, 0)], 0);
      throttle.report();
      pipe.advance();
      limits_loads = limits_loads && pipe.index != 0;
    }
  }
}
