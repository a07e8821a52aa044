// Loads of FP8 query rows, with their scales.

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
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// Issues the copies of Q of a work item, by `threads` threads of which this is number `thread`. The
// QK GEMM takes Q as loaded, and multiplies the scores by its scales.
__device__ inline void load_q(const Params& params, const WorkCoord& coord, SharedMemoryPlan& smem,
                              int thread, int threads) {
  load_q_async(params, coord, smem, thread, threads,
               [&](int row, bool is_row, i64 query, int lane) {
                 if (lane != 0) return;
                 const bool is_scaled = is_row && params.query_scales != nullptr;
                 smem.query_scale[0][row] = is_scaled ? params.query_scales[query] : 1.0f;
               });
}

// Converts the e4m3 rope part of Q in place to the bf16 of the stored one, which is exact. A lane
// converts the chunk that it has copied, so no barrier is needed before it reads; the lanes of a
// row overwrite each other's chunks, so all are read before any is written.
__device__ inline void convert_q_rope(SharedMemoryPlan& smem, int thread, int num_threads) {
  const int lane = thread % 8;
  unsigned char* rope = smem.query + kLatentTiles * kQueryTileBytes;
  cp_async_wait_group<0>();
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += num_threads / 8) {
    const auto chunk = [&](int i) {
      return reinterpret_cast<Chunk*>(rope + swizzled_offset<kQueryRopeRowBytes>(row, i));
    };
    const bool has_chunk = lane < kQueryRopeBytes / kChunkBytes;
    Chunk converted[2];
    if (has_chunk) dequant_e4m3(Bf16{}, *chunk(lane), converted);
    __syncwarp();  // all lanes have read their chunks
    if (!has_chunk) continue;
    *chunk(lane * 2) = converted[0];
    *chunk(lane * 2 + 1) = converted[1];
  }
}

// Waits for the copies of Q and arrives at `full`. Called by the threads that issued them.
template <int>
__device__ inline void finish_q_load(SharedMemoryPlan& smem, const Barrier& full, int thread,
                                     int num_threads) {
  if constexpr (kConvertsQRope) convert_q_rope(smem, thread, num_threads);
  finish_q_load(full);
}

// Loads and completes the first Q, by the PV threads, of which this is number `thread`.
__device__ inline void load_first_q(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, const Barrier& full, int thread) {
  load_q(params, coord, smem, thread, kPvThreads);
  finish_q_load<kLatentTiles / 2>(smem, full, reload_tid(), kPvThreads);
}

// Loads and completes Q of a later work item, by the producer threads.
__device__ inline void load_later_q(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread) {
  load_q(params, coord, smem, thread, kProducerThreads);
  finish_q_load<2>(smem, smem.query_full, thread, kProducerThreads);
}

// The QK warpgroup does not convert Q.
__device__ inline void convert_q(SharedMemoryPlan&, int, int) {}
