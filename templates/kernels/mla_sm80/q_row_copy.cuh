// Load of a Q row that needs no conversion.

#pragma once

#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "q_rows.cuh"
#include "shared_memory.cuh"

__device__ inline void load_query_row(const Params& params, i64 query, int head, int row, int lane,
                                      SharedMemoryPlan& smem) {
  const unsigned char* latent = latent_q(params, query, head);
  const unsigned char* rope = rope_q(params, query, head);
  constexpr int kLatentChunks = kLatentDim / kChunkElements;
#pragma unroll
  for (int chunk = 0; chunk < kHeadDimQk / kChunkElements; chunk += 8) {
    const unsigned char* source = chunk < kLatentChunks
                                      ? latent + (chunk + lane) * kChunkBytes
                                      : rope + (chunk - kLatentChunks + lane) * kChunkBytes;
    cp_async_cg_16(shared_address(query_chunk(smem, row, chunk + lane)), source, kChunkBytes);
  }
}
