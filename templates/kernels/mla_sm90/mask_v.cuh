// NaN/Inf in masked V: replaces non-finite elements by zero before the PV GEMM. The probability of
// a masked token is 0, but 0 * NaN is NaN.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"

constexpr u32 kExponentBits = kIsSame<Element, Bf16> ? 0x7f80 : 0x7c00;

__device__ inline bool is_finite(u32 element) { return (element & kExponentBits) != kExponentBits; }

// A pair of elements with zero for NaN and Inf.
__device__ inline u32 finite_pair(u32 pair) {
  return (is_finite(pair) ? pair & 0xffff : 0) | (is_finite(pair >> 16) ? pair & 0xffff0000 : 0);
}

// Called by 128 threads. Clears non-finite V elements of a KV block's tokens from `first` on;
// `tile_of(i)` is the address of its tile i. Sets the flag if any row attends to such a token, that
// is, one before `num_attended`: the epilogue then restores the NaN/Inf.
template <typename TileOf>
__device__ inline void clear_nonfinite(SharedMemoryPlan& smem, int first, int num_attended,
                                       TileOf tile_of) {
  constexpr int kTokenChunks = kLatentDim * 2 / kChunkBytes;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 128; i < (kBlockN - first) * kTokenChunks;
       i += 128) {
    const int token = first + i / kTokenChunks;
    const int chunk = i % kTokenChunks;
    Chunk* chunk_ptr =
        reinterpret_cast<Chunk*>(tile_of(chunk / 8) + token * kTileRowBytes) + chunk % 8;
    const Chunk stored = *chunk_ptr;
    Chunk cleared;
    bool is_changed = false;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      cleared.words[word] = finite_pair(stored.words[word]);
      is_changed |= cleared.words[word] != stored.words[word];
    }
    if (!is_changed) continue;
    *chunk_ptr = cleared;
    if (token < num_attended) smem.has_nonfinite = 1;
  }
}
