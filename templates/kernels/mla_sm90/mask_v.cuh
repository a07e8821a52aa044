// Values that some row of a tile must not see: 0 * NaN is NaN, so what is not finite must not
// meet the tensor cores, though its weight is 0.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "finite.cuh"
#include "shared_memory.cuh"

// Puts zeros for what is not finite in the tokens from `first` on of a block, of whose tiles
// `tile_of` tells the places; 128 threads. Remembers whether a row sees such a token.
template <typename TileOf>
__device__ inline void clear_nonfinite(SharedMemoryPlan& smem, int first, int num_visible,
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
    if (token < num_visible) smem.has_nonfinite = 1;
  }
}
