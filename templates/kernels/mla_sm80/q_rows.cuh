// Source and destination of query rows.

#pragma once

#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"

// Latent and rope part may be separate tensors; strides in bytes.
__device__ inline const unsigned char* latent_q(const Params& params, i64 query, int head) {
  return params.query + query * params.query_stride + head * params.query_head_stride;
}

__device__ inline const unsigned char* rope_q(const Params& params, i64 query, int head) {
  return params.query_rope + query * params.query_rope_stride +
         head * params.query_rope_head_stride;
}

__device__ inline Chunk* query_chunk(SharedMemoryPlan& smem, int row, int chunk) {
  return reinterpret_cast<Chunk*>(smem.query + swizzled_offset<kTokenBytes>(row, chunk));
}
