// KV producer by TMA, seesaw: two warps load the KV blocks of all work items, even ones into stage
// 0 and odd ones into stage 1.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/kv_tma.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/load.cuh"
#include "ptx/sync.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// Copies tiles of KV blocks into stages.
struct KvTileCopy {
  const Params& params;
  SharedMemoryPlan& smem;
  u64 cache_hint = createpolicy_evict_first();  // even of KV that a CTA group shares

  // Called by a warp. Consumers process KV blocks in pairs: a missing odd block completes its phase
  // without bytes.
  template <int kStage, int kFirstTile, int kEndTile>
  __device__ void load(const KvTileBoxes& boxes, bool exists) const {
    if (elect_sync()) {
      if (exists) {
#pragma unroll
        for (int tile = kFirstTile; tile < kEndTile; ++tile) {
          const bool is_rope = tile == kLatentTiles;  // has its own tensor map
          const u32 full = shared_address(&smem.tile_full[kStage][tile]);
          mbarrier_arrive_expect_tx(full, boxes.tile_bytes());
          boxes.copy_tile(is_rope ? &params.rope_map : &params.latent_map, is_rope ? 0 : tile,
                          shared_address(smem.kv[kStage] + tile * kTileBytes), full, cache_hint);
        }
      } else {
#pragma unroll
        for (int tile = kFirstTile; tile < kEndTile; ++tile) arrive(smem.tile_full[kStage][tile]);
      }
    }
    __syncwarp();
  }
};

// Producer warp 0 loads the tiles that warpgroup 0 releases, and warp 1 those of warpgroup 1, in
// the order of the releases. A stage's rope tile, which has P, is released with the V tiles of the
// warpgroup that reads this P. `coord` is the first work item.
__device__ inline void producer_loop(const Params& params, int warp, WorkCoord coord,
                                     SharedMemoryPlan& smem) {
  constexpr int kHalf = kLatentTiles / 2;
  const KvTileCopy tiles{params, smem};
  u32 phase = 1;
  for (u32 work_idx = 0; coord.seq_idx >= 0; coord = next_work_coord(smem, work_idx)) {
    const int end = coord.first_kv_block + coord.num_kv_blocks;
    BlockTableReader block_table(params, coord);
    for (int kv_block = coord.first_kv_block; kv_block < end; kv_block += kStages) {
      const bool has_odd = kv_block + 1 < end;
      const KvTileBoxes even(block_table, kv_block, coord.kv_end);
      const KvTileBoxes odd(block_table, kv_block + has_odd, coord.kv_end);
      if (warp == 0) {
        wait(smem.wg0_empty[0], phase);
        tiles.load<0, 0, kHalf>(even, true);
        wait(smem.wg0_empty[1], phase);
        tiles.load<1, kLatentTiles, kTiles>(odd, has_odd);
        tiles.load<1, 0, kHalf>(odd, has_odd);
      } else {
        wait(smem.wg1_empty[0], phase);
        tiles.load<0, kHalf, kTiles>(even, true);
        wait(smem.wg1_empty[1], phase);
        tiles.load<1, kHalf, kLatentTiles>(odd, has_odd);
      }
      phase ^= 1;
    }
  }
}
