// The loader, one warp: streams the blocks of tokens of every item into two stages, even blocks
// into one and odd ones into the other.

#pragma once

#include "common/barriers.cuh"
#include "common/kv_cache_hint.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/block_table_reader.cuh"
#include "pipeline/tma_boxes.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// What a lane copies of every block: a tile. The lanes behind the last tile copy nothing.
struct LaneTile {
  const TensorMap* map;
  int column;
  u32 target;  // of the first stage
  u32 full;
  u64 policy;

  __device__ LaneTile(const Params& params, const SharedMemory& shared) {
    const int tile = min(lane_index(), kTiles - 1);
    const bool is_rope = tile == kLatentTiles;  // in a map of its own
    map = is_rope ? &params.rope_map : &params.latent_map;
    column = is_rope ? 0 : tile;
    target = shared_address(shared.tokens[0] + tile * kTileBytes);
    full = shared_address(&shared.tile_full[0][tile]);
    policy = policy_of_lines(params.cta_group_size > 1);
  }

  // A block that does not exist, for items are taken in pairs of blocks, arrives with nothing in
  // it.
  __device__ void load(const BlockBoxes& boxes, bool exists, int stage) const {
    const u32 stage_full = full + stage * kTiles * sizeof(Barrier);
    if (exists) {
      mbarrier_arrive_expect_tx(stage_full, boxes.tile_bytes());
      boxes.copy_tile(map, column, target + stage * kTiles * kTileBytes, stage_full, policy);
    } else {
      mbarrier_arrive(stage_full);
    }
  }
};

__device__ inline void load_block(const LaneTile& tile, PageIds& ids, const Part& part, int stage,
                                  int block, u32 parity, const SharedMemory& shared) {
  const bool exists = block < part.first_block + part.blocks;
  const BlockBoxes boxes(ids, exists ? block : block - 1, part.visible_to_any);
  const int lane = lane_index();
  wait_for(shared.left_empty[stage], parity);
  if (lane < kLatentTiles / 2) tile.load(boxes, exists, stage);
  wait_for(shared.right_empty[stage], parity);
  if (lane >= kLatentTiles / 2 && lane < kLatentTiles) tile.load(boxes, exists, stage);
  wait_for(shared.rope_empty[stage], parity);
  if (lane == kLatentTiles) tile.load(boxes, exists, stage);
}

// `part` is of the first item.
__device__ inline void load_tokens(const Params& params, int member, Part part,
                                   SharedMemory& shared) {
  const LaneTile tile(params, shared);
  u32 parity = 1;
  for (u32 count = 0; part.request >= 0; part = next_part(shared, count)) {
    const int end = part.first_block + part.blocks;
    PageIds ids(params, part);
    for (int block = part.first_block; block < end; block += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        const int ahead = block + stage + kPrefetchBlocks;
        const bool is_mine = params.cta_group_size > 1 && member == stage;
        if (is_mine && ahead < end) prefetch_block(params, ids, ahead);
        load_block(tile, ids, part, stage, block + stage, parity, shared);
      }
      parity ^= 1;
    }
  }
}
