// Loads of 16-bit query rows, converted to fp16 for K dequantized to fp16.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/load_q.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/sync.cuh"
#include "query_scale.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// fp16 has three bits more than bf16: an element down to 2^-21 of the largest of its row is exact,
// the error of a smaller one is less than 2^-32 of the largest. The rope part stays bf16.

// A thread's part of a row of Q: in every other tile, two adjacent chunks. Four threads share the
// 128 bytes of a tile row; eight adjacent ones have two rows, whose chunks differ in their banks.
struct QPart {
  int row;
  int tile;  // the first
  int chunk;  // the first of two

  __device__ explicit QPart(int thread)
      : row(thread / 16 * 2 + thread / 4 % 2), tile(thread / 8 % 2), chunk(thread % 4 * 2) {}
};
constexpr int kQPartTiles = kLatentTiles / 2;
using QChunks = Chunk[kQPartTiles][2];

// Over the threads of a row, which are lanes that differ in bits 0, 1 and 3.
__device__ inline u32 max_over_row(u32 amax) {
#pragma unroll
  for (int bit = 0; bit < 4; ++bit) {
    if (bit != 2) amax = max_u16x2(amax, __shfl_xor_sync(~0u, amax, 1 << bit));
  }
  return max(amax & 0xffff, amax >> 16);
}

// Two bf16 to fp16, times a power of two.
__device__ inline u32 scaled_fp16x2(u32 pair, float factor) {
  return cvt_rn_x2_f32(Fp16{}, __uint_as_float(pair & 0xffff0000) * factor,
                       __uint_as_float(pair << 16) * factor);
}

__device__ inline Chunk scale_chunk(const Chunk& chunk, float factor) {
  Chunk scaled;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const u32 pair = chunk.words[word];
    scaled.words[word] = cvt_rn_x2_f32(Bf16{}, __uint_as_float(pair & 0xffff0000) * factor,
                                       __uint_as_float(pair << 16) * factor);
  }
  return scaled;
}

// Converts a thread's part of a row, and stores it in the order of the K fragments: a lane has four
// adjacent elements of every 16, of which an MMA takes the first two in its lower and the others in
// its upper half.
__device__ inline void store_q_part(SharedMemoryPlan& smem, const QPart& part,
                                    const QChunks& chunks, int slot) {
  u32 amax = 0;  // of the low and of the high halves of all words
#pragma unroll
  for (int i = 0; i < kQPartTiles * 8; ++i) {
    amax = max_u16x2(amax, chunks[i / 8][i / 4 % 2].words[i % 4] & 0x7fff7fff);
  }
  const QScale q_scale(max_over_row(amax));
  if (part.tile == 0 && part.chunk == 0) smem.query_scale[slot][part.row] = q_scale.scale;
  unsigned char* row = smem.query + part.tile * kQueryTileBytes;
  Chunk* targets[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    targets[half] =
        reinterpret_cast<Chunk*>(row + swizzled_offset<kTileRowBytes>(part.row, part.chunk + half));
  }
#pragma unroll
  for (int i = 0; i < kQPartTiles; ++i) {
    constexpr int kChunksPerTile = kQueryTileBytes / kChunkBytes;
    Chunk stored[2];
    if (kHasBf16Rope && i * 2 + part.tile >= kCodeTiles) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        stored[half] = scale_chunk(chunks[i][half], q_scale.inv_scale * kKScaleFactor);
      }
    } else {
#pragma unroll
      for (int pair = 0; pair < 8; ++pair) {
        stored[pair % 2].words[pair / 2] =
            scaled_fp16x2(chunks[i][pair / 4].words[pair % 4], q_scale.inv_scale);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) targets[half][i * 2 * kChunksPerTile] = stored[half];
  }
}

// Converts Q in place, once its copies have arrived, with its scales in a slot of work items.
__device__ inline void convert_q(SharedMemoryPlan& smem, int slot, int thread, int threads) {
  QPart part(thread);
#pragma unroll 1
  for (; part.row < kBlockM; part.row += threads / 8) {
    QChunks chunks;
#pragma unroll
    for (int i = 0; i < kQPartTiles * 2; ++i) {
      const unsigned char* tile = smem.query + (i / 2 * 2 + part.tile) * kQueryTileBytes;
      chunks[i / 2][i % 2] = *reinterpret_cast<const Chunk*>(
          tile + swizzled_offset<kTileRowBytes>(part.row, part.chunk + i % 2));
    }
    store_q_part(smem, part, chunks, slot);
  }
  fence_proxy_async();
}

// Loads and converts the first Q, by the PV threads, of which this is number `thread`, and arrives
// at `full`. A row is converted by the warp that has copied it.
__device__ inline void load_first_q(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, const Barrier& full, int thread) {
  load_q_async(params, coord, smem, thread, kPvThreads);
  cp_async_wait_group<0>();
  __syncwarp();
  convert_q(smem, 0, thread, kPvThreads);
  __syncwarp();
  if (reload_lane() == 0) arrive(full);
}

// Loads Q of a later work item, by the producer threads, for the QK warpgroup to convert.
__device__ inline void load_later_q(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread) {
  load_q_async(params, coord, smem, thread, kProducerThreads);
  cp_async_mbarrier_arrive_noinc(shared_address(&smem.query_full));
}

static_assert(kQkConvertsQ, "the QK warpgroup converts every later Q");
