// KV producer by TMA, swap-AB: one warp loads the KV blocks of all work items, in stages of some
// tiles.

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
#include "shared_memory.cuh"

// A stage is one TMA copy of three tiles if pages hold whole KV blocks and the rope dims are not a
// separate tensor, and one copy per tile and TMA box otherwise.
__device__ inline void copy_stage(const Params& params, const KvTileBoxes& boxes, int first_tile,
                                  u32 target, u32 full, u64 cache_hint) {
  mbarrier_arrive_expect_tx(full, kTilesPerStage * boxes.tile_bytes());
  if (kBoxes == 1 && !params.separate_rope) {
    cp_async_bulk_tensor(target, &params.kv_map, full, cache_hint, 0, boxes.slot[0], first_tile,
                         boxes.page[0]);
    return;
  }
#pragma unroll
  for (int tile = 0; tile < kTilesPerStage; ++tile) {
    const bool is_rope = first_tile + tile == kLatentTiles;
    boxes.copy_tile(is_rope ? &params.rope_map : &params.latent_map,
                    is_rope ? 0 : first_tile + tile, target + tile * kTileBytes, full, cache_hint);
  }
}

// `coord` is the first work item.
__device__ inline void producer_loop(const Params& params, int, WorkCoord coord,
                                     SharedMemoryPlan& smem) {
  const u64 cache_hint = kv_cache_hint(params.cta_group_size);
  PipelineState<kStages> pipe;
  for (u32 work_idx = 0; coord.seq_idx >= 0; coord = next_work_coord(smem, work_idx)) {
    const int end = coord.first_kv_block + coord.num_kv_blocks;
    BlockTableReader block_table(params, coord);
    for (int kv_block = coord.first_kv_block; kv_block < end; ++kv_block) {
      const KvTileBoxes boxes(block_table, kv_block, coord.kv_end);
#pragma unroll
      for (int stage = 0; stage < kStagesPerBlock; ++stage) {
        wait(smem.kv_empty[pipe.index], pipe.phase ^ 1);
        if (elect_sync()) {
          copy_stage(params, boxes, stage * kTilesPerStage, shared_address(smem.kv[pipe.index]),
                     shared_address(&smem.kv_full[pipe.index]), cache_hint);
        }
        __syncwarp();
        pipe.advance();
      }
    }
  }
}
