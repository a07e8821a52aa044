// Loads of 16-bit query rows, split into two FP8 terms.

#pragma once

#include "common/barriers.cuh"
#include "common/fp8.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/sync.cuh"
#include "query_scale.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// The QK GEMM takes K as stored, in e4m3, so Q must be e4m3 too. bf16 has twice the significant
// bits of e4m3, so hi + lo is exact for elements down to 2^-9 of the largest of their row. The
// terms of smaller ones are subnormal, and the error is less than 2^-16 of the largest.

__device__ inline float element_of(const Chunk& chunk, int i) {
  return cvt_f32(Bf16{}, static_cast<u16>(chunk.words[i / 2] >> i % 2 * 16));
}

// The first four significant bits, which e4m3 holds.
__device__ inline float hi_part(float element) {
  return __uint_as_float(__float_as_uint(element) & 0xfff00000);
}

// Splits two elements: hi terms into the low half of the word, lo terms into the high half.
__device__ inline u32 split_pair(float low, float high) {
  const float hi_low = hi_part(low);
  const float hi_high = hi_part(high);
  return e4m3x2_of_f32(hi_high, hi_low) | e4m3x2_of_f32(high - hi_high, low - hi_low) << 16;
}

// Hi and lo terms of the eight elements of a chunk.
struct SplitChunk {
  uint2 hi;
  uint2 lo;

  __device__ void split(const Chunk& chunk, float inv_scale) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = split_pair(element_of(chunk, i * 2) * inv_scale,
                            element_of(chunk, i * 2 + 1) * inv_scale);
    }
    hi = make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410),
                    __byte_perm(pairs[2], pairs[3], 0x5410));
    lo = make_uint2(__byte_perm(pairs[0], pairs[1], 0x7632),
                    __byte_perm(pairs[2], pairs[3], 0x7632));
  }
};

// Row of the tiles of codes that has a row of Q. Interleaved, row n of an MMA is term n % 2 of tile
// row n / 2, and a thread has columns 2c and 2c + 1 of every eight. In this order those are the
// terms of rows 2c and 2c + 1 of every eight, of which it has the scores.
__device__ inline int query_place(int row) {
  return kInterleavesQTerms ? row / 8 * 8 + row % 2 * 4 + row % 8 / 2 : row;
}

// Places of the terms of chunk `chunk` of a tile row whose hi terms precede its lo terms.
struct TermPlaces {
  u32 hi;
  u32 lo;

  __device__ TermPlaces(int row, int chunk) {
    const u32 half = chunk % 2 * sizeof(uint2);
    hi = half + (kInterleavesQTerms ? swizzled_offset<64>(row * 2, chunk / 2)
                                    : swizzled_offset<128>(row, chunk / 2));
    lo = half + (kInterleavesQTerms ? swizzled_offset<64>(row * 2 + 1, chunk / 2)
                                    : swizzled_offset<128>(row, chunk / 2 + 4));
  }
};

// Splits this lane's chunks of a tile row, in `kCount` tiles from `first` on. Eight lanes share the
// row and overwrite each other's chunks in place, so all are read before any is written; `kCount`
// tiles share that barrier. Of groups of 128 dims, the even tile of a pair receives the hi terms of
// both, the odd one the lo terms.
template <int kCount>
__device__ inline void split_chunks(unsigned char* query, int row, int lane, int first,
                                    float inv_scale) {
  unsigned char* tiles = query + first * kQueryTileBytes;
  SplitChunk split_chunk[kCount];
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const unsigned char* src = tiles + tile * kQueryTileBytes + swizzled_offset<128>(row, lane);
    split_chunk[tile].split(*reinterpret_cast<const Chunk*>(src), inv_scale);
  }
  __syncwarp();  // all lanes have read their chunks
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    if constexpr (kCodeTileDims < kTileRowBytes) {
      const TermPlaces places(row, lane);
      *reinterpret_cast<uint2*>(tiles + tile * kQueryTileBytes + places.hi) = split_chunk[tile].hi;
      *reinterpret_cast<uint2*>(tiles + tile * kQueryTileBytes + places.lo) = split_chunk[tile].lo;
      continue;
    }
    const u32 chunk = swizzled_offset<128>(row, tile % 2 * 4 + lane / 2) + lane % 2 * sizeof(uint2);
    unsigned char* dst = tiles + tile / 2 * 2 * kQueryTileBytes + chunk;
    *reinterpret_cast<uint2*>(dst) = split_chunk[tile].hi;
    *reinterpret_cast<uint2*>(dst + kQueryTileBytes) = split_chunk[tile].lo;
  }
}

// The same for an e4m3 rope part: the hi terms of a row precede its lo terms.
__device__ inline void split_rope(unsigned char* query, int row, int lane, float inv_scale) {
  unsigned char* tile = query + kCodeTiles * kQueryTileBytes;
  SplitChunk split_chunk;
  split_chunk.split(*reinterpret_cast<const Chunk*>(tile + swizzled_offset<128>(row, lane)),
                    inv_scale);
  __syncwarp();  // all lanes have read their chunks
  tile += lane % 2 * sizeof(uint2);
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2)) = split_chunk.hi;
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2 + 4)) = split_chunk.lo;
}

__device__ inline void scale_chunk(Chunk& chunk, float inv_scale) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    chunk.words[word] = cvt_rn_x2_f32(Bf16{}, element_of(chunk, word * 2 + 1) * inv_scale,
                                      element_of(chunk, word * 2) * inv_scale);
  }
}

// Issues the copies of Q of a work item, by `threads` threads of which this is number `thread`.
__device__ inline void load_q(const Params& params, const WorkCoord& coord, SharedMemoryPlan& smem,
                              int thread, int threads) {
  if constexpr (kInterleavesQTerms) {
    load_q_async(
        params, coord, smem, thread, threads, [](int, bool, i64, int) {},
        [&](u32 target, int row, int tile) {
          if (tile >= kCodeTiles) return target;
          return shared_address(smem.query) +
                 swizzled_offset<kTileRowBytes>(query_place(row), thread % 8);
        });
  } else {
    load_q_async(params, coord, smem, thread, threads);
  }
}

// Splits Q in place, kTilesPerStep tiles at a time. Of two groups of PV warps each splits half of
// the tiles of all rows, the second group the last ones: they synchronize before they read tiles
// that the other group has copied, and before they overwrite tiles that it reads.
template <int kTilesPerStep, int kGroups>
__device__ inline void split_q(SharedMemoryPlan& smem, int thread, int num_threads) {
  num_threads /= kGroups;
  int group = 0;
  if constexpr (kGroups > 1) {
    group = thread / num_threads;
    thread %= num_threads;
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  }
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += num_threads / 8) {
    unsigned char* ptr = smem.query + swizzled_offset<128>(row, lane);
    const unsigned char* code_ptr = smem.query + swizzled_offset<128>(query_place(row), lane);
    u32 amax = 0;  // of the low and of the high halves of all words
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const unsigned char* tile_ptr = tile < kCodeTiles ? code_ptr : ptr;
      const Chunk& chunk = *reinterpret_cast<const Chunk*>(tile_ptr + tile * kQueryTileBytes);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        amax = max_u16x2(amax, chunk.words[word] & 0x7fff7fff);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      amax = max_u16x2(amax, __shfl_xor_sync(~0u, amax, lanes));
    }
    const QScale q_scale(max(amax & 0xffff, amax >> 16));
    if (lane == 0) smem.query_scale[0][row] = q_scale.scale;
    if constexpr (kGroups > 1) named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
    constexpr int kWholeSteps = kCodeTiles / kTilesPerStep * kTilesPerStep;
#pragma unroll 1
    for (int tile = group * kTilesPerStep; tile < kWholeSteps; tile += kTilesPerStep * kGroups) {
      split_chunks<kTilesPerStep>(smem.query, query_place(row), lane, tile, q_scale.inv_scale);
    }
    if (group + 1 != kGroups) continue;
    if constexpr (kWholeSteps < kCodeTiles) {
      split_chunks<kCodeTiles - kWholeSteps>(smem.query, query_place(row), lane, kWholeSteps,
                                             q_scale.inv_scale);
    }
    if constexpr (kHasBf16Rope) {
      scale_chunk(*reinterpret_cast<Chunk*>(ptr + kCodeTiles * kQueryTileBytes),
                  q_scale.inv_scale * kKScaleFactor);
    } else if constexpr (kStoredRopeDim > 0) {
      split_rope(smem.query, row, lane, q_scale.inv_scale);
    }
  }
  fence_proxy_async();
}

// Waits for the copies of Q, splits it and arrives at `full`. Called by the threads that issued the
// copies, each for its own chunks.
template <int kTilesPerStep, int kGroups = 1>
__device__ inline void finish_q_load(SharedMemoryPlan& smem, const Barrier& full, int thread,
                                     int num_threads) {
  cp_async_wait_group<0>();
  split_q<kTilesPerStep, kGroups>(smem, thread, num_threads);
  __syncwarp();
  if (reload_lane() == 0) arrive(full);
}

// Loads and completes the first Q, by the PV threads, of which this is number `thread`.
__device__ inline void load_first_q(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, const Barrier& full, int thread) {
  load_q(params, coord, smem, thread, kPvThreads);
  if constexpr (kSplitsQAfterIds) {
    named_barrier_sync(NamedBarrier::FirstIdsRead, kPvThreads + kProducerThreads);
  }
  constexpr bool kInOneStep = kQkConvertsQ && kQSplitGroups == 1;
  finish_q_load<kInOneStep ? kCodeTiles : kLatentTiles / 2, kQSplitGroups>(smem, full, reload_tid(),
                                                                           kPvThreads);
}

// Loads Q of a later work item, by the producer threads, and completes it or leaves that to the QK
// warpgroup.
__device__ inline void load_later_q(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread) {
  load_q(params, coord, smem, thread, kProducerThreads);
  if constexpr (kQkConvertsQ) {
    cp_async_mbarrier_arrive_noinc(shared_address(&smem.query_full));
  } else {
    finish_q_load<2>(smem, smem.query_full, thread, kProducerThreads);
  }
}

// Called by the QK warpgroup.
__device__ inline void convert_q(SharedMemoryPlan& smem, int thread, int threads) {
  split_q<kCodeTiles, 1>(smem, thread, threads);
}
