// KV producer warp: loads the KV blocks of all work items by TMA, even blocks into stage 0 and odd
// blocks into stage 1.

#pragma once

#include "common/barriers.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/kv_tma.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/sync.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// The tile of each KV block that a lane copies. Lanes past the last tile copy nothing.
struct KvTileCopy {
  const TensorMap* map;
  int column;
  u32 target;  // of the first stage
  u32 barrier;  // of the first stage
  u64 cache_hint;

  __device__ KvTileCopy(const Params& params, const SharedMemoryPlan& smem) {
    const int tile = min(lane_index(), kTiles - 1);
    const bool is_rope = tile == kLatentTiles;  // has its own tensor map
    map = is_rope ? &params.rope_map : &params.latent_map;
    column = is_rope ? 0 : tile;
    target = shared_address(smem.kv[0] + tile * kTileBytes);
    barrier = shared_address(&smem.tile_full[0][tile]);
    cache_hint = kv_cache_hint(params.cta_group_size > 1);
  }

  // Consumers process KV blocks in pairs: a missing odd block completes its phase without bytes.
  __device__ void load(const KvTileBoxes& boxes, bool exists, int stage) const {
    const u32 stage_barrier = barrier + stage * kTiles * sizeof(Barrier);
    if (exists) {
      mbarrier_arrive_expect_tx(stage_barrier, boxes.tile_bytes());
      boxes.copy_tile(map, column, target + stage * kStageTiles * kTileBytes, stage_barrier,
                      cache_hint);
    } else {
      mbarrier_arrive(stage_barrier);
    }
  }
};

__device__ inline void load_kv_block(const KvTileCopy& tile, BlockTableReader& block_table,
                                     const WorkCoord& coord, int stage, int kv_block, u32 phase,
                                     const SharedMemoryPlan& smem) {
  const bool exists = kv_block < coord.first_kv_block + coord.num_kv_blocks;
  const KvTileBoxes boxes(block_table, exists ? kv_block : kv_block - 1, coord.kv_end);
  const int lane = lane_index();
  wait(smem.wg0_empty[stage], phase);
  if (lane < kLatentTiles / 2) tile.load(boxes, exists, stage);
  wait(smem.wg1_empty[stage], phase);
  if (lane >= kLatentTiles / 2 && lane < kLatentTiles) tile.load(boxes, exists, stage);
  if constexpr (kRopeDim > 0) {
    wait(smem.rope_empty[stage], phase);
    if (lane == kLatentTiles) tile.load(boxes, exists, stage);
  }
}

// `coord` is the first work item.
__device__ inline void producer_loop(const Params& params, int rank_in_group, WorkCoord coord,
                                     SharedMemoryPlan& smem) {
  const KvTileCopy tile(params, smem);
  u32 phase = 1;
  for (u32 work_idx = 0; coord.seq_idx >= 0; coord = next_work_coord(smem, work_idx)) {
    const int end = coord.first_kv_block + coord.num_kv_blocks;
    BlockTableReader block_table(params, coord);
    for (int kv_block = coord.first_kv_block; kv_block < end; kv_block += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const int ahead = kv_block + stage + kPrefetchBlocks;
        const bool prefetches = params.cta_group_size > 1 && rank_in_group == stage;
        if (prefetches && ahead < end) prefetch_kv_block(params, block_table, ahead);
        load_kv_block(tile, block_table, coord, stage, kv_block + stage, phase, smem);
      }
      phase ^= 1;
    }
  }
}
