// KV producer over top-k indices, swap-AB: fills stages of some tiles as they are released.

#pragma once

#include "common/barriers.cuh"
#include "config.cuh"
#include "gather_rows.cuh"
#include "pipeline/gather_kv.cuh"
#include "shared_memory.cuh"

// Streams the KV blocks of a work item into stages of some tiles. A stage is filled as soon as it
// is empty: more than a KV block is in flight while consumers have another.
struct KvBlockStream : GatheredRows {
  using GatheredRows::GatheredRows;

  // No more than the stages hold: consumers would free one for the next block after they have Q.
  static constexpr int kBlocksBeforeQ = kStages / kStagesPerBlock;

  __device__ int load_kv_blocks(SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                int kv_block) {
    constexpr int kLastTiles = kTilesPerStage - (kTiles - kLatentTiles);  // beside the rope tile
    const ChunkSources latent = latent_sources(token_address);
    const ChunkSources rope = kRopeDim > 0 ? rope_sources() : latent;
    const ChunkTargets targets(smem);
#pragma unroll
    for (int stage = 0; stage < kStagesPerBlock; ++stage) {
      const int first = stage * kTilesPerStage;
      const int target = pipe.index * kTilesPerStage;
      wait(smem.kv_empty[pipe.index], pipe.phase ^ 1);
      if (stage == 0) store_invalid_bits(smem.invalid_mask[pipe.index], producer_warp());
      if (stage < kStagesPerBlock - 1) {
        copy_tiles<kTilesPerStage>(latent, first, targets, target);
      } else {
        copy_tiles<kLastTiles>(latent, first, targets, target);
        if constexpr (kRopeDim > 0) copy_tiles<1>(rope, 0, targets, target + kLastTiles);
      }
      arrive_after_copies(smem.kv_full[pipe.index]);
      pipe.advance();
    }
    advance(kv_block);
    return 1;
  }
};
