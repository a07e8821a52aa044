// KV producer: four warps gather the stored tokens of each KV block into its stage by cp.async.

#pragma once

#include "common/barriers.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_rows.cuh"
#include "kv_token.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// The row pointer that another lane holds.
__device__ inline const unsigned char* row_of_lane(const unsigned char* row_ptr, int lane) {
  return reinterpret_cast<const unsigned char*>(
      __shfl_sync(~0u, reinterpret_cast<u64>(row_ptr), lane));
}

// Unroll factor of the copy loop: complete, or smaller for sparse kernels, whose I-cache footprint
// is larger.
constexpr int kCopyUnroll = kIsSparse ? 2 : kTokensPerProducerWarp;

// Copies kCount chunks of every token of the warp, kLanes of them at a time, to
// `address_of(token, chunk)`. `row_ptr` is the source of this lane's token. Invalid tokens are
// zero-filled.
template <int kLanes, int kCount, typename AddressOf>
__device__ inline void copy_chunks(const unsigned char* row_ptr, u32 invalid_bits, u64 cache_hint,
                                   AddressOf address_of) {
  constexpr int kTokens = kWarpLanes / kLanes;  // per iteration
  const int lane = reload_lane();
  const int chunk = lane % kLanes;
#pragma unroll kCopyUnroll
  for (int first = 0; first < kTokensPerProducerWarp; first += kTokens) {
    const int token = first + lane / kLanes;
    const unsigned char* source = row_of_lane(row_ptr, token) + chunk * kChunkBytes;
    const u32 bytes = invalid_bits >> token & 1 ? 0 : kChunkBytes;
    const u32 target = address_of(token, chunk);
#pragma unroll
    for (int chunk_offset = 0; chunk_offset < kCount; chunk_offset += kLanes) {
      // A multiple of a row's chunks: the next ones lie whole tiles further.
      constexpr int kTileChunks = kTileRowBytes / kChunkBytes;
      cp_async_cg_16(target + chunk_offset / kTileChunks * kTileBytes,
                     source + chunk_offset * kChunkBytes, bytes, cache_hint);
    }
  }
}

// Streams the KV blocks of a work item.
struct KvBlockStream {
  const Params& params;
  const WorkCoord& coord;  // in shared memory
  int next_id;  // page id or top-k index of this lane's token in the KV block after the next
  TokenAddress token_address;  // of this lane's token in the next KV block

  __device__ KvBlockStream(const Params& params, const WorkCoord& coord)
      : params(params),
        coord(coord),
        next_id(TokenIds(params, coord).read(coord.first_kv_block + 1)),
        token_address(params, TokenIds(params, coord).read(coord.first_kv_block),
                      coord.first_kv_block) {}

  // Issues the copies of a KV block, then resolves the addresses of the next one.
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
    const int warp = reload_warp() % kProducerWarps;
    const int first = warp * kTokensPerProducerWarp;
    const u32 target = shared_address(smem.kv[stage]);
    const StoredToken stored = stored_token(params, token_address.page, token_address.slot);
    const u64 cache_hint = kv_cache_hint(params.cta_group_size > 1);
    const auto latent_address = [&](int token, int chunk) {
      return target + chunk / 8 * kTileBytes + swizzled_offset<128>(first + token, chunk % 8);
    };
    copy_chunks<16, kLatentDim / kChunkBytes>(stored.row, token_address.invalid_bits, cache_hint,
                                              latent_address);
    const unsigned char* rope = kHasBf16Rope
                                    ? stored.row + kRopeOffset
                                    : stored_rope(params, token_address.page, token_address.slot);
    const auto rope_address = [&](int token, int chunk) {
      return target + kRopeTileOffset + swizzled_offset<kRopeBytes>(first + token, chunk);
    };
    copy_chunks<kRopeChunks, kRopeChunks>(rope, token_address.invalid_bits, cache_hint,
                                          rope_address);
    copy_scales(stored, smem.kv[stage] + kScalesOffset + first * kChunkBytes);
    if (kIsSparse && reload_lane() == 0) {
      smem.invalid_mask[stage].bits[warp] = static_cast<u16>(token_address.invalid_bits);
    }
  }

  // Copies the scales of the warp's tokens to `target`; a lane copies those of its own token.
  __device__ void copy_scales(const StoredToken& stored, unsigned char* target) const {
    const int token = reload_lane();
    if (token >= kTokensPerProducerWarp) return;
    target += token * kChunkBytes;
    const bool exists = (token_address.invalid_bits >> token & 1) == 0;
    if constexpr (kHasInlineScales) {
      cp_async_cg_16(shared_address(target), stored.row + kLatentDim, exists ? kChunkBytes : 0);
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
static_assert(kLatentDim / kChunkBytes % 16 == 0, "lanes copy the same number of chunks");
