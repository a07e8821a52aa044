// Makes a query what it is multiplied as.

#pragma once

#include "common/barriers.cuh"
#include "common/fp8.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/fence.cuh"
#include "ptx/max_u16x2.cuh"
#include "shared_memory.cuh"

// Keys are multiplied as they are stored, in e4m3, of which bf16 has twice the digits: an element
// of the query is the sum of two, if it is not 2^17 times smaller than the largest of its row.

// What a row is divided by, a power of two, so that its largest element is less than 256; and what
// it is multiplied by instead: of a row that is not all finite, NaN.
struct QueryScale {
  float scale;
  float factor;

  // `amax` is the magnitude of the largest element, as its bits.
  __device__ explicit QueryScale(u32 amax) {
    constexpr u32 kNan = 0xff;
    const u32 exponent = max(amax >> 7, 8u);  // both are normal numbers
    scale = __uint_as_float((exponent - 7) << 23);
    factor = __uint_as_float(exponent == kNan ? 0x7fffffff : (261 - exponent) << 23);
  }
};

__device__ inline float element_of(const Chunk& chunk, int i) {
  return cvt_f32(Bf16{}, static_cast<u16>(chunk.words[i / 2] >> i % 2 * 16));
}

// The first four significant bits of a bf16.
__device__ inline float hi_part(float element) {
  return __uint_as_float(__float_as_uint(element) & 0xfff00000);
}

// Two elements: their first parts in the low half, the second in the high one.
__device__ inline u32 split_pair(float low, float high) {
  const float hi_low = hi_part(low);
  const float hi_high = hi_part(high);
  return e4m3x2_of_f32(hi_high, hi_low) | e4m3x2_of_f32(high - hi_high, low - hi_low) << 16;
}

// A chunk, split: its eight elements' first parts, and the second.
struct SplitChunk {
  uint2 hi;
  uint2 lo;

  __device__ void split(const Chunk& chunk, float factor) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] =
          split_pair(element_of(chunk, i * 2) * factor, element_of(chunk, i * 2 + 1) * factor);
    }
    hi = make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410),
                    __byte_perm(pairs[2], pairs[3], 0x5410));
    lo = make_uint2(__byte_perm(pairs[0], pairs[1], 0x7632),
                    __byte_perm(pairs[2], pairs[3], 0x7632));
  }
};

// Splits this lane's chunks of a row from tile `hi` on, an even one. Eight lanes have the row;
// the tiles are split together, for each waits for what the other lanes have to read. Of two tiles
// one becomes the first parts of both, the other the second.
template <int kCount>
__device__ inline void split_chunks(unsigned char* query, int row, int lane, int first,
                                    float factor) {
  unsigned char* tiles = query + first * kQueryTileBytes;
  SplitChunk split_chunk[kCount];
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const unsigned char* own = tiles + tile * kQueryTileBytes + swizzled_offset<128>(row, lane);
    split_chunk[tile].split(*reinterpret_cast<const Chunk*>(own), factor);
  }
  __syncwarp();  // all lanes have read
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const u32 chunk = swizzled_offset<128>(row, tile % 2 * 4 + lane / 2) + lane % 2 * sizeof(uint2);
    unsigned char* to = tiles + tile / 2 * 2 * kQueryTileBytes + chunk;
    *reinterpret_cast<uint2*>(to) = split_chunk[tile].hi;
    *reinterpret_cast<uint2*>(to + kQueryTileBytes) = split_chunk[tile].lo;
  }
}

// The same of the rope part, whose first parts come before the second in each row.
__device__ inline void split_rope(unsigned char* query, int row, int lane, float factor) {
  unsigned char* tile = query + kLatentTiles * kQueryTileBytes;
  SplitChunk split_chunk;
  split_chunk.split(*reinterpret_cast<const Chunk*>(tile + swizzled_offset<128>(row, lane)),
                    factor);
  __syncwarp();  // all lanes have read
  tile += lane % 2 * sizeof(uint2);
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2)) = split_chunk.hi;
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2 + 4)) = split_chunk.lo;
}

__device__ inline void scale_chunk(Chunk& chunk, float factor) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    chunk.words[word] = cvt_rn_x2_f32(Bf16{}, element_of(chunk, word * 2 + 1) * factor,
                                      element_of(chunk, word * 2) * factor);
  }
}

// By the threads that have copied it, each its own chunks, kTilesPerStep tiles at a time; tells
// `full`.
template <int kTilesPerStep>
__device__ inline void finish_q_load(SharedMemoryPlan& smem, const Barrier& full, int thread,
                                     int threads) {
  cp_async_wait_group<0>();
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += threads / 8) {
    unsigned char* ptr = smem.query + swizzled_offset<128>(row, lane);
    u32 amax = 0;  // of either half of the words
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Chunk& chunk = *reinterpret_cast<const Chunk*>(ptr + tile * kQueryTileBytes);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        amax = max_u16x2(amax, chunk.words[word] & 0x7fff7fff);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      amax = max_u16x2(amax, __shfl_xor_sync(~0u, amax, lanes));
    }
    const QueryScale of_row(max(amax & 0xffff, amax >> 16));
    if (lane == 0) smem.query_scale[row] = of_row.scale;
#pragma unroll 1
    for (int tile = 0; tile < kLatentTiles; tile += kTilesPerStep) {
      split_chunks<kTilesPerStep>(smem.query, row, lane, tile, of_row.factor);
    }
    if constexpr (kHasBf16Rope) {
      scale_chunk(*reinterpret_cast<Chunk*>(ptr + kLatentTiles * kQueryTileBytes), of_row.factor);
    } else {
      split_rope(smem.query, row, lane, of_row.factor);
    }
  }
  fence_proxy_async();
  __syncwarp();
  if (reload_lane() == 0) arrive(full);
}
