// Loads the CTA's query rows into shared memory.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "work_tile.cuh"

__device__ inline void load_q(const Params& params, const Work& work, SharedMemoryPlan& smem) {
  constexpr int kChunks = kHeadDim * 2 / kChunkBytes;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    Chunk value{};
    if (row < work.rows) {
      const i64 query = work.first_query + work.query_of(params, row);
      const u16* source = params.query + query * params.query_stride +
                          work.head_of(params, row) * params.query_head_stride;
      value = reinterpret_cast<const Chunk*>(source)[chunk];
    }
    *reinterpret_cast<Chunk*>(smem.query + row * kRowBytes + chunk * kChunkBytes) = value;
  }
}
