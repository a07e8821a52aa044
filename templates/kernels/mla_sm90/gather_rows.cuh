// KV producer over top-k indices: four warps gather the rows of 16-bit tokens by cp.async. Whatever
// copies need is known before their stage is empty: they follow its release in straight lines.

#pragma once

#include "common/paged_kv.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_token.cuh"
#include "pipeline/gather_kv.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mov.cuh"
#include "shared_memory.cuh"

// Eight lanes copy a tile's row, a chunk each, so the lanes of a warp copy rows of four tokens at
// once. A lane copies its chunk of every fourth token of the warp.
constexpr int kLanesPerRow = kTileRowBytes / kChunkBytes;
constexpr int kTokensPerCopy = kWarpLanes / kLanesPerRow;
constexpr int kTokensPerLane = kTokensPerProducerWarp / kTokensPerCopy;
constexpr int kSwizzleRows = 8;  // rows so far apart have the same permutation of chunks

// This lane's chunk of the first tile of each of its tokens in the cache.
struct ChunkSources {
  const unsigned char* source[kTokensPerLane];

  // `row_ptr` is the source of the token that this lane has in the TokenStream.
  __device__ explicit ChunkSources(const unsigned char* row_ptr) {
    const int lane = reload_lane();
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      source[i] = row_of_lane(row_ptr, i * kTokensPerCopy + lane / kLanesPerRow) +
                  lane % kLanesPerRow * kChunkBytes;
    }
  }
};

// Their targets in the first tile of the first stage.
struct ChunkTargets {
  u32 target[kSwizzleRows / kTokensPerCopy];

  __device__ explicit ChunkTargets(const SharedMemoryPlan& smem) {
    const int lane = reload_lane();
    const int first = producer_warp() * kTokensPerProducerWarp + lane / kLanesPerRow;
#pragma unroll
    for (int i = 0; i < kSwizzleRows / kTokensPerCopy; ++i) {
      target[i] = shared_address(smem.kv) +
                  swizzled_offset<kTileRowBytes>(first + i * kTokensPerCopy, lane % kLanesPerRow);
      mov_b32(target[i]);  // opaque: otherwise every copy computes its own
    }
  }

  __device__ u32 of(int tile, int i) const {
    const int row = i * kTokensPerCopy;
    return target[row % kSwizzleRows / kTokensPerCopy] +
           row / kSwizzleRows * kSwizzleRows * kTileRowBytes + tile * kTileBytes;
  }
};

// The rows of a KV block.
struct GatheredRows : TokenStream {
  using TokenStream::TokenStream;

  __device__ ChunkSources latent_sources(const TokenAddress& token) const {
    return ChunkSources(stored_token(params, token.page, token.slot).row);
  }

  __device__ ChunkSources rope_sources() const {
    return ChunkSources(stored_rope(params, token_address.page, token_address.slot));
  }

  // Copies kCount tiles from tile `first` of the sources on to tile `target` of the stages.
  template <int kCount>
  __device__ void copy_tiles(const ChunkSources& sources, int first, const ChunkTargets& targets,
                             int target) const {
    u64 policy = kEvictFirst;
    mov_b64(policy);  // opaque: otherwise it stays in other registers from stage to stage
    const int first_token = reload_lane() / kLanesPerRow;
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int token = first_token + i * kTokensPerCopy;
      const u32 bytes = token_address.invalid_bits >> token & 1 ? 0 : kChunkBytes;
#pragma unroll
      for (int tile = 0; tile < kCount; ++tile) {
        cp_async_cg_16(targets.of(target + tile, i),
                       sources.source[i] + (first + tile) * kTileRowBytes, bytes, policy);
      }
    }
  }
};
