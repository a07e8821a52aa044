// Loads the CTA's query rows into shared memory.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "q_row.cuh"
#include "q_rows.cuh"
#include "shared_memory.cuh"
#include "work_tile.cuh"

// Eight lanes load one row.
__device__ inline void load_q(const Params& params, const Work& work, SharedMemoryPlan& smem) {
  const int lane = lane_index() % 8;
  for (int row = static_cast<int>(threadIdx.x) / 8; row < kBlockM; row += kThreads / 8) {
    const int packed_row = work.first_row + row;
    if (row < work.rows) {
      const i64 query = work.first_query + packed_row / work.heads;
      load_query_row(params, query, packed_row % work.heads, row, lane, smem);
    } else {
      for (int chunk = lane; chunk < kTokenBytes / kChunkBytes; chunk += 8) {
        *query_chunk(smem, row, chunk) = Chunk{};
      }
    }
  }
}
