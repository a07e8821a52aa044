// NaN/Inf handling of V: keeps masked and non-finite V out of the PV GEMM, because 0 x NaN is NaN,
// and adds non-finite elements back for the rows that attend to them.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include "ptx/sync.cuh"
#include "work_item.cuh"

// Chunk `chunk` of token `warp_token` of a warp in a V tile.
__device__ inline Chunk* chunk_at(unsigned char* tile, int warp, int warp_token, int chunk) {
  constexpr int kSwizzleChunks = kSwizzleBytes / kChunkBytes;
  const int token = first_token_of_warp(warp) + warp_token;
  unsigned char* head = tile + head_of_warp(warp) * kHeadBytes;
  const u32 offset = static_cast<u32>(chunk % kSwizzleChunks * kChunkBytes) ^ swizzle_of(token);
  return reinterpret_cast<Chunk*>(head + token_offset(token) +
                                  chunk / kSwizzleChunks * kColumnBytes + offset);
}

// Clears V of this warp's tokens that are masked for some rows: whole tokens that no row attends
// to, and non-finite elements of the others. Returns whether it cleared a non-finite element, which
// restore_nonfinite then adds back.
__device__ inline bool clear_masked(const WorkItem& work, int first_token, int warp,
                                    unsigned char* tile) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  const KvRange unmasked = {work.unmasked_kv_begin, work.unmasked_kv_end};
  const KvRange attended = {work.kv_begin, work.kv_end};
  bool has_nonfinite = false;
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int i = lane_index(); i < kWarpTokens * kChunks; i += kWarpLanes) {
    const int token = first_token + i / kChunks;
    if (unmasked.contains(token)) continue;
    Chunk* chunk = chunk_at(tile, warp, i / kChunks, i % kChunks);
    Chunk cleared{};
    if (attended.contains(token)) {
      const Chunk stored = *chunk;
      cleared = zero_nonfinite(stored);
#pragma unroll
      for (int word = 0; word < 4; ++word)
        has_nonfinite |= cleared.words[word] != stored.words[word];
    }
    *chunk = cleared;
  }
  // Orders these writes before the next TMA write to the stage.
  fence_proxy_async();
  __syncwarp();  // the cleared V is visible to all lanes
  return __any_sync(~0u, has_nonfinite);
}

// Adds the non-finite elements of a token that is masked for some rows, if this row attends to it.
// Unweighted: times any probability they are the same.
__device__ inline float4 add_nonfinite(const Params& params, const WorkItem& work, int row, int dim,
                                       int token, float4 out) {
  if (!work.attends(params, row, token)) return out;
  const int* page_ids = work.page_ids(params);
  const int page = page_ids[token / kPageSize];
  if (!is_valid_page(page, params.num_pages)) return out;
  const PagedRows cached{params.value_cache + work.kv_head * params.value_head_stride,
                         params.value_page_stride, params.value_token_stride};
  const unsigned char* element_row = cached.row_of(page, token % kPageSize);
  float* sums[4] = {&out.x, &out.y, &out.z, &out.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float element = element_at(element_row, dim + i);
    if (!(fabsf(element) < kInfinity)) *sums[i] += element;
  }
  return out;
}

// The same for all such tokens of a work item, and four adjacent dims of a row.
__device__ inline float4 restore_nonfinite(const Params& params, const WorkItem& work, int row,
                                           int dim, float4 out) {
  const int begin = max(work.kv_begin, work.first_kv_block * kBlockN);
  const int end = min(work.kv_end, (work.first_kv_block + work.num_kv_blocks) * kBlockN);
#pragma unroll 1
  for (int token = begin; token < min(work.unmasked_kv_begin, end); ++token) {
    out = add_nonfinite(params, work, row, dim, token, out);
  }
#pragma unroll 1
  for (int token = max(max(begin, work.unmasked_kv_begin), work.unmasked_kv_end); token < end;
       ++token) {
    out = add_nonfinite(params, work, row, dim, token, out);
  }
  return out;
}
