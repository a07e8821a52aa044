// Four warps bring the tokens of every item into the stages, as they are stored.

#pragma once

#include "common/barriers.cuh"
#include "common/kv_cache_hint.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_rows.cuh"
#include "kv_token.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// A pointer of another lane's token.
__device__ inline const unsigned char* row_of_lane(const unsigned char* own, int lane) {
  return reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, reinterpret_cast<u64>(own), lane));
}

// So many turns of the loop that copies a block stand beside each other: all, or with lists, whose
// kernels have more to be fetched, fewer.
constexpr int kCopyUnroll = kIsSparse ? 2 : kWarpTokens;

// Copies kCount chunks of every token of the warp from `stored` on, kLanes of them at a time, to
// where `token_address` says; what does not exist becomes zeros.
template <int kLanes, int kCount, typename AddressOf>
__device__ inline void copy_chunks(const unsigned char* own, u32 missing, u64 cache_hint,
                                   AddressOf address_of) {
  constexpr int kTokens = kWarpLanes / kLanes;  // at a time
  const int lane = reload_lane();
  const int chunk = lane % kLanes;
#pragma unroll kCopyUnroll
  for (int first = 0; first < kWarpTokens; first += kTokens) {
    const int token = first + lane / kLanes;
    const unsigned char* source = row_of_lane(own, token) + chunk * kChunkBytes;
    const u32 bytes = missing >> token & 1 ? 0 : kChunkBytes;
    const u32 target = address_of(token, chunk);
#pragma unroll
    for (int more = 0; more < kCount; more += kLanes) {
      // So many chunks on is so many tiles on.
      constexpr int kTileChunks = kTileRowBytes / kChunkBytes;
      cp_async_cg_16(target + more / kTileChunks * kTileBytes, source + more * kChunkBytes, bytes,
                     cache_hint);
    }
  }
}

// Streams the blocks of an item.
struct KvBlockStream {
  const Params& params;
  const WorkCoord& coord;  // in shared memory
  int next_id;  // of the block after the next
  TokenAddress token_address;  // in the next block

  __device__ KvBlockStream(const Params& params, const WorkCoord& coord)
      : params(params),
        coord(coord),
        next_id(TokenIds(params, coord).read(coord.first_kv_block + 1)),
        token_address(params, TokenIds(params, coord).read(coord.first_kv_block),
                      coord.first_kv_block) {}

  // Copies a block, and finds out where the next is.
  __device__ void load_kv_block(SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                int kv_block) {
    const int stage = pipe.index;
    wait(smem.kv_empty[stage], pipe.phase ^ 1);
    copy_rows(smem, stage);
    cp_async_mbarrier_arrive_noinc(shared_address(&smem.kv_full[stage]));
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_full[stage]);
    pipe.advance();
    token_address = TokenAddress(params, next_id, kv_block + 1);
    next_id = TokenIds(params, coord).read(kv_block + 2);
  }

  __device__ void copy_rows(SharedMemoryPlan& smem, int stage) const {
    const int warp = reload_warp() % kLoadWarps;
    const int first = warp * kWarpTokens;
    const u32 target = shared_address(smem.kv[stage]);
    const StoredToken stored = stored_token(params, token_address.page, token_address.slot);
    const u64 cache_hint = kv_cache_hint(params.cta_group_size > 1);
    const auto latent_address = [&](int token, int chunk) {
      return target + chunk / 8 * kTileBytes + swizzled_offset<128>(first + token, chunk % 8);
    };
    copy_chunks<16, kLatentDim / kChunkBytes>(stored.row, token_address.missing, cache_hint,
                                              latent_address);
    const unsigned char* rope = kHasBf16Rope
                                    ? stored.row + kRopeOffset
                                    : stored_rope(params, token_address.page, token_address.slot);
    const auto rope_address = [&](int token, int chunk) {
      return target + kRopeTileOffset + swizzled_offset<kRopeBytes>(first + token, chunk);
    };
    copy_chunks<kRopeChunks, kRopeChunks>(rope, token_address.missing, cache_hint, rope_address);
    copy_scales(stored, smem.kv[stage] + kScalesOffset + first * kChunkBytes);
    if (kIsSparse && reload_lane() == 0) {
      smem.invalid_mask[stage].bits[warp] = static_cast<u16>(token_address.missing);
    }
  }

  // The scales of the warp's tokens, to `target`. Each lane has those of its own.
  __device__ void copy_scales(const StoredToken& stored, unsigned char* target) const {
    const int token = reload_lane();
    if (token >= kWarpTokens) return;
    target += token * kChunkBytes;
    const bool exists = (token_address.missing >> token & 1) == 0;
    if constexpr (kHasInnerScales) {
      cp_async_cg_16(shared_address(target), stored.row + kLatentDim, exists ? kChunkBytes : 0);
    } else {
      if (stored.scales == nullptr) {
        const float scale = exists ? stored.latent_scale : 0.0f;
        *reinterpret_cast<float4*>(target) = {scale, scale, scale, scale};
        return;
      }
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        const float* source = stored.scales + (kHasOneScale ? 0 : group);
        cp_async_ca_4(shared_address(target + group * sizeof(float)), source,
                      exists ? sizeof(float) : 0);
      }
    }
  }
};
static_assert(kLatentDim / kChunkBytes % 16 == 0, "lanes copy the same number of chunks");
