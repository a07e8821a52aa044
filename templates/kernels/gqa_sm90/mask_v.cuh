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
__device__ inline Chunk* chunk_at(unsigned char* tile, int warp, int own_token, int chunk) {
  constexpr int kLineChunks = kLineBytes / kChunkBytes;
  const int token = first_of_warp(warp) + own_token;
  unsigned char* head = tile + head_of_warp(warp) * kHeadBytes;
  const u32 place = static_cast<u32>(chunk % kLineChunks * kChunkBytes) ^ swizzle_of(token);
  return reinterpret_cast<Chunk*>(head + token_offset(token) + chunk / kLineChunks * kColumnBytes +
                                  place);
}

// Looks after the tokens that not all rows see, of those that this warp has of a tile. What nobody
// sees is cleared, and so is of the others what is not finite; says whether there was such, which
// rows that see it must still get.
__device__ inline bool clear_hidden(const Item& item, int first_token, int warp,
                                    unsigned char* tile) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  const Sight all = {item.all_begin, item.all_end};
  const Sight any = {item.any_begin, item.any_end};
  bool has_nonfinite = false;
  // Not unrolled: a rare path must not take registers from the loop over tokens.
#pragma unroll 1
  for (int i = lane_index(); i < kWarpTokens * kChunks; i += kWarpLanes) {
    const int token = first_token + i / kChunks;
    if (all.has(token)) continue;
    Chunk* chunk = chunk_at(tile, warp, i / kChunks, i % kChunks);
    Chunk kept{};
    if (any.has(token)) {
      const Chunk stored = *chunk;
      kept = finite_part(stored);
#pragma unroll
      for (int word = 0; word < 4; ++word) has_nonfinite |= kept.words[word] != stored.words[word];
    }
    *chunk = kept;
  }
  // What is copied here next comes after this.
  fence_proxy_async();
  __syncwarp();  // and all of it is there for all lanes
  return __any_sync(~0u, has_nonfinite);
}

// Adds what is not finite of a token that not all rows see: times any probability it is the same.
__device__ inline float4 add_nonfinite(const Params& params, const Item& item, int row, int dim,
                                       int token, float4 values) {
  if (!item.sees(params, row, token)) return values;
  const int* ids =
      params.block_tables + item.request * static_cast<i64>(params.block_tables_stride);
  const int page = ids[token / kPageSize];
  if (!is_page(page, params.num_pages)) return values;
  const PagedRows cached{params.value_cache + item.kv_head * params.value_head_stride,
                         params.value_page_stride, params.value_token_stride};
  const unsigned char* from = cached.row_of(page, token % kPageSize);
  float* sums[4] = {&values.x, &values.y, &values.z, &values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float element = element_at(from, dim + i);
    if (!(fabsf(element) < kInfinity)) *sums[i] += element;
  }
  return values;
}

// All of it that the tiles of an item have, for four neighbouring values of a row.
__device__ inline float4 restore_nonfinite(const Params& params, const Item& item, int row, int dim,
                                           float4 values) {
  const int begin = max(item.any_begin, item.first_tile * kTileTokens);
  const int end = min(item.any_end, (item.first_tile + item.tiles) * kTileTokens);
#pragma unroll 1
  for (int token = begin; token < min(item.all_begin, end); ++token) {
    values = add_nonfinite(params, item, row, dim, token, values);
  }
#pragma unroll 1
  for (int token = max(max(begin, item.all_begin), item.all_end); token < end; ++token) {
    values = add_nonfinite(params, item, row, dim, token, values);
  }
  return values;
}
