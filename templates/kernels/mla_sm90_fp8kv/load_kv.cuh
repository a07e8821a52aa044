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
constexpr int kCopyTurns = kIsSparse ? 2 : kWarpTokens;

// Copies kCount chunks of every token of the warp from `own` on, kLanes of them at a time, to where
// `place` says; what does not exist becomes zeros.
template <int kLanes, int kCount, typename Place>
__device__ inline void copy_chunks(const unsigned char* own, u32 missing, u64 policy, Place place) {
  constexpr int kTokens = kWarpLanes / kLanes;  // at a time
  const int lane = fresh_lane();
  const int chunk = lane % kLanes;
#pragma unroll kCopyTurns
  for (int first = 0; first < kWarpTokens; first += kTokens) {
    const int token = first + lane / kLanes;
    const unsigned char* source = row_of_lane(own, token) + chunk * kChunkBytes;
    const u32 bytes = missing >> token & 1 ? 0 : kChunkBytes;
    const u32 target = place(token, chunk);
#pragma unroll
    for (int more = 0; more < kCount; more += kLanes) {
      // So many chunks on is so many tiles on.
      constexpr int kTileChunks = kTileRowBytes / kChunkBytes;
      cp_async_cg_16(target + more / kTileChunks * kTileBytes, source + more * kChunkBytes, bytes,
                     policy);
    }
  }
}

// Streams the blocks of an item.
struct BlockStream {
  const Params& params;
  const Part& part;  // in shared memory
  int next_id;  // of the block after the next
  TokenPlace place;  // in the next block

  __device__ BlockStream(const Params& params, const Part& part)
      : params(params),
        part(part),
        next_id(TokenIds(params, part).read(part.first_block + 1)),
        place(params, TokenIds(params, part).read(part.first_block), part.first_block) {}

  // Copies a block, and finds out where the next is.
  __device__ void take_block(SharedMemory& shared, RingPosition<kStages>& position, int block) {
    const int stage = position.stage;
    wait_for(shared.tokens_empty[stage], position.parity ^ 1);
    copy_rows(shared, stage);
    cp_async_mbarrier_arrive_noinc(shared_address(&shared.tokens_full[stage]));
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.tokens_full[stage]);
    position.advance();
    place = TokenPlace(params, next_id, block + 1);
    next_id = TokenIds(params, part).read(block + 2);
  }

  __device__ void copy_rows(SharedMemory& shared, int stage) const {
    const int warp = fresh_warp() % kLoadingWarps;
    const int first = warp * kWarpTokens;
    const u32 target = shared_address(shared.tokens[stage]);
    const StoredToken own = stored_token(params, place.page, place.slot);
    const u64 policy = policy_of_lines(params.cta_group_size > 1);
    const auto latent_place = [&](int token, int chunk) {
      return target + chunk / 8 * kTileBytes + swizzled_offset<128>(first + token, chunk % 8);
    };
    copy_chunks<16, kLatentDim / kChunkBytes>(own.row, place.missing, policy, latent_place);
    const unsigned char* rope =
        kIsPacked ? own.row + kRopeOffset : stored_rope(params, place.page, place.slot);
    const auto rope_place = [&](int token, int chunk) {
      return target + kRopeTileOffset + swizzled_offset<kRopeBytes>(first + token, chunk);
    };
    copy_chunks<kRopeChunks, kRopeChunks>(rope, place.missing, policy, rope_place);
    copy_scales(own, shared.tokens[stage] + kScalesOffset + first * kChunkBytes);
    if (kIsSparse && fresh_lane() == 0) {
      shared.unlisted[stage].bits[warp] = static_cast<u16>(place.missing);
    }
  }

  // The scales of the warp's tokens, to `target`. Each lane has those of its own.
  __device__ void copy_scales(const StoredToken& own, unsigned char* target) const {
    const int token = fresh_lane();
    if (token >= kWarpTokens) return;
    target += token * kChunkBytes;
    const bool exists = (place.missing >> token & 1) == 0;
    if constexpr (kHasInnerScales) {
      cp_async_cg_16(shared_address(target), own.row + kLatentDim, exists ? kChunkBytes : 0);
    } else {
      if (own.scales == nullptr) {
        const float scale = exists ? own.latent_scale : 0.0f;
        *reinterpret_cast<float4*>(target) = {scale, scale, scale, scale};
        return;
      }
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        const float* source = own.scales + (kHasOneScale ? 0 : group);
        cp_async_ca_4(shared_address(target + group * sizeof(float)), source,
                      exists ? sizeof(float) : 0);
      }
    }
  }
};
static_assert(kLatentDim / kChunkBytes % 16 == 0, "lanes copy the same number of chunks");
