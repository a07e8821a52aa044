// Loads of the stored tokens of a KV block.

#pragma once

#include "common/barriers.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_token.cuh"
#include "load_query.cuh"
#include "pipeline/gather_kv.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// The stored token at an address: a page and slot, or rows of one of two pools.
using PagedAddress = TokenAddressOf<Params, false>;
using PooledAddress = TokenAddressOf<Params, true>;

__device__ inline StoredToken token_at(const Params& params, const PagedAddress& address) {
  return stored_token(params, address.page, address.slot);
}
__device__ inline StoredToken token_at(const Params&, const PooledAddress& address) {
  return {address.rows.data, nullptr, 1.0f};
}

// Its rope part, in a tensor that is not packed.
__device__ inline const unsigned char* rope_at(const Params& params, const PagedAddress& address) {
  return stored_rope(params, address.page, address.slot);
}
__device__ inline const unsigned char* rope_at(const Params&, const PooledAddress&) {
  return nullptr;
}

// Its scale row.
__device__ inline const unsigned char* scale_row_at(const PagedAddress&) { return nullptr; }
__device__ inline const unsigned char* scale_row_at(const PooledAddress& address) {
  return address.rows.scales;
}

// Lanes that copy the codes of a token: as many divide them evenly.
constexpr int kCopyLanes = kCodeTileDims < kTileRowBytes ? kCodeTileDims / kChunkBytes : 16;

// Streams the KV blocks of a work item into their stages.
struct KvBlockStream : TokenStream {
  using TokenStream::TokenStream;

  static constexpr int kBlocksBeforeQ = kStages - 1;

  __device__ static void begin_loads() {
    if constexpr (kSplitsQAfterIds) {
      named_barrier_arrive(NamedBarrier::FirstIdsRead, kPvThreads + kProducerThreads);
    }
  }

  // Otherwise the first loads of the last CTAs queue behind all loads of the others.
  __device__ static void wait_for_first(const SharedMemoryPlan& smem) { wait(smem.kv_full[0], 0); }

  // Converts a 16-bit Q, so it is complete when the producer warps have waited for it; or leaves
  // that to the QK warpgroup.
  __device__ static void load_query(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread) {
    load_later_q(params, coord, smem, thread);
  }

  __device__ int load_kv_blocks(SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                int kv_block) {
    const int stage = pipe.index;
    wait(smem.kv_empty[stage], pipe.phase ^ 1);
    copy_rows(smem, stage);
    arrive_after_copies(smem.kv_full[stage]);
    pipe.advance();
    advance(kv_block);
    return 1;
  }

  __device__ void copy_rows(SharedMemoryPlan& smem, int stage) const {
    const int warp = producer_warp();
    const int first = warp * kTokensPerProducerWarp;
    const u32 target = shared_address(smem.kv[stage]);
    const StoredToken stored = token_at(params, token_address);
    const u64 cache_hint = kv_cache_hint(params.cta_group_size);
    constexpr int kTileChunks = kCodeTileDims / kChunkBytes;
    const auto latent_address = [&](int token, int chunk) {
      return target + chunk / kTileChunks * kCodeTileBytes +
             swizzled_offset<kCodeTileDims>(first + token, chunk % kTileChunks);
    };
    copy_chunks<kCopyLanes, kCodeDims / kChunkBytes, kTileChunks>(
        stored.row, token_address.invalid_bits, cache_hint, latent_address);
    if constexpr (kStoredRopeDim > 0) {
      const unsigned char* rope =
          kHasBf16Rope ? stored.row + kRopeOffset : rope_at(params, token_address);
      const auto rope_address = [&](int token, int chunk) {
        return target + kRopeTileOffset + swizzled_offset<kRopeBytes>(first + token, chunk);
      };
      copy_chunks<kRopeChunks, kRopeChunks>(rope, token_address.invalid_bits, cache_hint,
                                            rope_address);
    }
    copy_scales(stored, smem.kv[stage] + kScalesOffset + first * kTokenScaleBytes, cache_hint);
    store_invalid_bits(smem.invalid_mask[stage], warp);
  }

  // Copies the scales of the warp's tokens to `target`; a lane copies those of its own token.
  __device__ void copy_scales(const StoredToken& stored, unsigned char* target,
                              u64 cache_hint) const {
    const int token = reload_lane();
    if (token >= kTokensPerProducerWarp) return;
    target += token * kTokenScaleBytes;
    const bool exists = (token_address.invalid_bits >> token & 1) == 0;
    if constexpr (KvRow::kScaleBytes == kChunkBytes) {
      const unsigned char* source =
          kHasInlineScales ? stored.row + KvRow::kCodeBytes : scale_row_at(token_address);
      cp_async_cg_16(shared_address(target), source, exists ? kChunkBytes : 0, cache_hint);
    } else if constexpr (KvRow::kHasScaleRows) {
      cp_async_ca_8(shared_address(target), scale_row_at(token_address),
                    exists ? KvRow::kScaleRowBytes : 0);
    } else {
      if (stored.scales == nullptr) {
        const float scale = exists ? stored.latent_scale : 0.0f;
        *reinterpret_cast<float4*>(target) = {scale, scale, scale, scale};
        return;
      }
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        const float* source = stored.scales + (kHasPerTokenScale ? 0 : group);
        cp_async_ca_4(shared_address(target + group * sizeof(float)), source,
                      exists ? sizeof(float) : 0);
      }
    }
  }
};
static_assert(kCodeDims / kChunkBytes % kCopyLanes == 0, "lanes copy the same number of chunks");
