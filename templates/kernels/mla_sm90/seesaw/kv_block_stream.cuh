// KV producer over top-k indices, seesaw: fills the two stages in the order of their releases.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "gather_rows.cuh"
#include "pipeline/gather_kv.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// Streams the KV blocks of a work item, even ones into stage 0 and odd ones into stage 1, in parts:
// the V tiles of either warpgroup, and the rope tile.
struct KvBlockStream : GatheredRows {
  static constexpr int kBlocksBeforeQ = 1;

  int even_id;  // of this lane's token in the even KV block of the next pair; `next_id`: in the odd

  __device__ KvBlockStream(const Params& params, const WorkCoord& coord)
      : GatheredRows(params, coord), even_id(-1) {}

  // Consumers process KV blocks in pairs: a missing odd block completes its phases without copies.
  // An odd KV block is loaded with the even one, but for the first, which is loaded after Q: the
  // releases of a pair follow each other closely, and the next pair is far.
  __device__ int load_kv_blocks(SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                int kv_block) {
    const int index = kv_block - coord.first_kv_block;
    const int odd_index = index | 1;
    const int odd_block = coord.first_kv_block + odd_index;
    const u32 phase = pipe.phase ^ 1;
    if (index > 1) token_address = TokenAddress(params, *this, even_id, kv_block);
    const TokenAddress odd_address(params, *this, next_id, odd_block);
    const ChunkSources odd_rows = latent_sources(odd_address);
    const ChunkTargets targets(smem);
    if (index > 0) {
      even_id = TokenIds(params, coord, *this).read(odd_block + 1);
      next_id = TokenIds(params, coord, *this).read(odd_block + 2);
    }
    const bool has_odd = odd_index < coord.num_kv_blocks;
    if (index % 2 == 0) {
      fill_stage<0>(smem, phase, latent_sources(token_address), targets);
      if (index == 0 && has_odd) return 1;
    }
    if (has_odd) {
      token_address = odd_address;
      fill_stage<1>(smem, phase, odd_rows, targets);
    } else {
      skip_stage<1>(smem, phase);
    }
    pipe.phase ^= 1;
    return has_odd ? odd_index - index + 1 : 1;
  }

  // Warpgroup 0 releases its V tiles of an even KV block first, and warpgroup 1 those of an odd
  // one; the QK GEMM of the next such block begins with them. The rope tile, which has P, is
  // released with the others.
  template <int kStage>
  __device__ void fill_stage(SharedMemoryPlan& smem, u32 phase, const ChunkSources& latent,
                             const ChunkTargets& targets) const {
    ChunkSources rope = latent;
    if constexpr (kRopeDim > 0 && kStage == 0) rope = rope_sources();
    wait(first_release<kStage>(smem), phase);
    fill_tiles<kStage, kFirstTile<kStage>, kTilesPerArrival>(smem, latent, targets);
    // The releases of an odd KV block are a PV GEMM apart.
    if constexpr (kRopeDim > 0 && kStage == 1) rope = rope_sources();
    wait(second_release<kStage>(smem), phase);
    store_invalid_bits(smem.invalid_mask[kStage], producer_warp());
    if constexpr (kRopeDim > 0) fill_tiles<kStage, kLatentTiles, 1>(smem, rope, targets);
    fill_tiles<kStage, kSecondTile<kStage>, kTilesPerArrival>(smem, latent, targets);
  }

  // The rope tile is the first one of its sources.
  template <int kStage, int kTile, int kCount>
  __device__ void fill_tiles(SharedMemoryPlan& smem, const ChunkSources& sources,
                             const ChunkTargets& targets) const {
    copy_tiles<kCount>(sources, kTile % kLatentTiles, targets, kStage * kStageTiles + kTile);
    arrive_after_copies(smem.tile_full[kStage][kTile]);
  }

  template <int kStage>
  __device__ static void skip_stage(SharedMemoryPlan& smem, u32 phase) {
    wait(first_release<kStage>(smem), phase);
    arrive_after_copies(smem.tile_full[kStage][kFirstTile<kStage>]);
    wait(second_release<kStage>(smem), phase);
    if constexpr (kRopeDim > 0) arrive_after_copies(smem.tile_full[kStage][kLatentTiles]);
    arrive_after_copies(smem.tile_full[kStage][kSecondTile<kStage>]);
  }

  template <int kStage>
  static constexpr int kFirstTile = kStage == 0 ? 0 : kTilesPerArrival;
  template <int kStage>
  static constexpr int kSecondTile = kTilesPerArrival - kFirstTile<kStage>;

  template <int kStage>
  __device__ static const Barrier& first_release(const SharedMemoryPlan& smem) {
    return kStage == 0 ? smem.wg0_empty[kStage] : smem.wg1_empty[kStage];
  }
  template <int kStage>
  __device__ static const Barrier& second_release(const SharedMemoryPlan& smem) {
    return kStage == 0 ? smem.wg1_empty[kStage] : smem.wg0_empty[kStage];
  }
};
