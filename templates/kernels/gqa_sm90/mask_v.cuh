// Keeps values that rows do not see out of products: 0 * NaN is NaN.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include "ptx/fence.cuh"
#include "tile_scheduler.cuh"

// Chunk `chunk` of a token of a tile that a warp has.
__device__ inline Chunk* chunk_at(unsigned char* tile, int warp, int token_of_lane, int chunk) {
  constexpr int kSwizzleChunks = kSwizzleBytes / kChunkBytes;
  const int token = first_of_warp(warp) + token_of_lane;
  unsigned char* head = tile + head_of_warp(warp) * kHeadBytes;
  const u32 offset = static_cast<u32>(chunk % kSwizzleChunks * kChunkBytes) ^ swizzle_of(token);
  return reinterpret_cast<Chunk*>(head + token_offset(token) +
                                  chunk / kSwizzleChunks * kColumnBytes + offset);
}

// Looks after the tokens that not all rows see, of those that this warp has of a tile. What nobody
// sees is cleared, and so is of the others what is not finite; says whether there was such, which
// rows that see it must still get.
__device__ inline bool clear_masked(const WorkItem& work, int first_token, int warp,
                                    unsigned char* tile) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  const KvRange unmasked = {work.unmasked_kv_begin, work.unmasked_kv_end};
  const KvRange attended = {work.kv_begin, work.kv_end};
  bool has_nonfinite = false;
  // Not unrolled: a rare path must not take registers from the loop over tokens.
#pragma unroll 1
  for (int i = lane_index(); i < kWarpTokens * kChunks; i += kWarpLanes) {
    const int token = first_token + i / kChunks;
    if (unmasked.contains(token)) continue;
    Chunk* chunk = chunk_at(tile, warp, i / kChunks, i % kChunks);
    Chunk cleared{};
    if (attended.contains(token)) {
      const Chunk stored = *chunk;
      cleared = finite_part(stored);
#pragma unroll
      for (int word = 0; word < 4; ++word)
        has_nonfinite |= cleared.words[word] != stored.words[word];
    }
    *chunk = cleared;
  }
  // What is copied here next comes after this.
  fence_proxy_async();
  __syncwarp();  // and all of it is there for all lanes
  return __any_sync(~0u, has_nonfinite);
}

// Adds what is not finite of a token that not all rows see: times any probability it is the same.
__device__ inline float4 add_nonfinite(const Params& params, const WorkItem& work, int row, int dim,
                                       int token, float4 values) {
  if (!work.attends(params, row, token)) return values;
  const int* page_ids =
      params.block_tables + work.seq_idx * static_cast<i64>(params.block_tables_stride);
  const int page = page_ids[token / kPageSize];
  if (!is_valid_page(page, params.num_pages)) return values;
  const PagedRows cached{params.value_cache + work.kv_head * params.value_head_stride,
                         params.value_page_stride, params.value_token_stride};
  const unsigned char* element_row = cached.row_of(page, token % kPageSize);
  float* sums[4] = {&values.x, &values.y, &values.z, &values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float element = element_at(element_row, dim + i);
    if (!(fabsf(element) < kInfinity)) *sums[i] += element;
  }
  return values;
}

// All of it that the tiles of an item have, for four neighbouring values of a row.
__device__ inline float4 restore_nonfinite(const Params& params, const WorkItem& work, int row,
                                           int dim, float4 values) {
  const int begin = max(work.kv_begin, work.first_kv_block * kBlockN);
  const int end = min(work.kv_end, (work.first_kv_block + work.num_kv_blocks) * kBlockN);
#pragma unroll 1
  for (int token = begin; token < min(work.unmasked_kv_begin, end); ++token) {
    values = add_nonfinite(params, work, row, dim, token, values);
  }
#pragma unroll 1
  for (int token = max(max(begin, work.unmasked_kv_begin), work.unmasked_kv_end); token < end;
       ++token) {
    values = add_nonfinite(params, work, row, dim, token, values);
  }
  return values;
}
