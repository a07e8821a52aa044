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
#include "scheduler/throttle.cuh"
#include "shared_memory.cuh"

// Issuing a copy takes hundreds of clocks beside products: the latent part of a block in one page
// is one copy. Else each lane copies a tile; those behind the last tile copy nothing.
__device__ inline void copy_block(const Params& params, const BlockBoxes& boxes, u32 target,
                                  u32 full, u64 policy) {
  const int lane = lane_index();
  if (lane == 0) mbarrier_arrive_expect_tx(full, boxes.count * kBoxTokens * kHeadDimQk);
  __syncwarp();
  if constexpr (kBoxes == 1) {
    if (lane == 0) {
      cp_async_bulk_tensor(target, &params.kv_map, full, policy, 0, boxes.slot[0], 0,
                           boxes.page[0]);
      cp_async_bulk_tensor(target + kLatentTiles * kTileBytes, &params.rope_map, full, policy, 0,
                           boxes.slot[0], 0, boxes.page[0]);
    }
  } else if (lane <= kLatentTiles) {
    const bool is_rope = lane == kLatentTiles;
    boxes.copy_tile(is_rope ? &params.rope_map : &params.latent_map, is_rope ? 0 : lane,
                    target + lane * kTileBytes, full, policy,
                    is_rope ? kRopeRowBytes : kTileRowBytes);
  }
  __syncwarp();
}

// `part` is of the first item. A block of a team has its first tokens before it asks for more: else
// the last of them waits for all that others have asked for.
__device__ inline void load_tokens(const Params& params, int, Part part, SharedMemory& shared) {
  const u64 policy = policy_of_lines(params.cta_group_size > 1);
  Pace pace(params, shared.scratch.span);
  RingPosition<kStages> position;
  bool waits = params.cta_group_size > 1;
  for (u32 count = 0; part.request >= 0; part = next_part(shared, count)) {
    const int end = part.first_block + part.blocks;
    PageIds ids(params, part);
#pragma unroll 1
    for (int block = part.first_block; block < end; ++block) {
      const BlockBoxes boxes(ids, block, part.visible_to_any);
      wait_for(shared.tokens_empty[position.stage], position.parity ^ 1);
      pace.wait();
      copy_block(params, boxes, shared_address(shared.tokens[position.stage]),
                 shared_address(&shared.tokens_full[position.stage]), policy);
      if (waits) wait_for(shared.tokens_full[0], 0);
      waits = false;
      pace.tell();
      position.advance();
    }
  }
}
