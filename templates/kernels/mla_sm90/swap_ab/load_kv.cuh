// The loader, one warp: streams the blocks of tokens of every item through the ring.

#pragma once

#include "common/barriers.cuh"
#include "common/kv_cache_hint.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/block_table_reader.cuh"
#include "pipeline/tma_boxes.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// Three tiles of whole blocks in one page are one copy, unless the rope part is a tensor of its
// own.
__device__ inline void copy_stage(const Params& params, const BlockBoxes& boxes, int first_tile,
                                  u32 target, u32 full, u64 policy) {
  mbarrier_arrive_expect_tx(full, kStageTiles * boxes.tile_bytes());
  if (kBoxes == 1 && !params.separate_rope) {
    cp_async_bulk_tensor(target, &params.kv_map, full, policy, 0, boxes.slot[0], first_tile,
                         boxes.page[0]);
    return;
  }
#pragma unroll
  for (int tile = 0; tile < kStageTiles; ++tile) {
    const bool is_rope = first_tile + tile == kLatentTiles;
    boxes.copy_tile(is_rope ? &params.rope_map : &params.latent_map,
                    is_rope ? 0 : first_tile + tile, target + tile * kTileBytes, full, policy);
  }
}

// `part` is of the first item.
__device__ inline void load_tokens(const Params& params, int, Part part, SharedMemory& shared) {
  const u64 policy = policy_of_lines(params.cta_group_size > 1);
  RingPosition<kStages> position;
  for (u32 count = 0; part.request >= 0; part = next_part(shared, count)) {
    const int end = part.first_block + part.blocks;
    PageIds ids(params, part);
    for (int block = part.first_block; block < end; ++block) {
      const BlockBoxes boxes(ids, block, part.visible_to_any);
#pragma unroll
      for (int index = 0; index < kBlockStages; ++index) {
        wait_for(shared.stage_empty[position.stage], position.parity ^ 1);
        if (lane_index() == 0) {
          copy_stage(params, boxes, index * kStageTiles,
                     shared_address(shared.tokens[position.stage]),
                     shared_address(&shared.stage_full[position.stage]), policy);
        }
        __syncwarp();
        position.advance();
      }
    }
  }
}
