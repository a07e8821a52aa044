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
#include "unaligned_rows.cuh"
#include "work_item.cuh"

// Chunk `chunk` of token `warp_token` of a warp in a V tile.
__device__ inline Chunk* chunk_at(unsigned char* tile, int warp, int warp_token, int chunk) {
  constexpr int kSwizzleChunks = kSwizzleBytes / kChunkBytes;
  const int token = first_token_of_warp(warp) + warp_token;
  unsigned char* head = tile + head_of_warp(warp) * ValueTile::kHeadBytes;
  const u32 offset = static_cast<u32>(chunk % kSwizzleChunks * kChunkBytes) ^ swizzle_of(token);
  return reinterpret_cast<Chunk*>(head + token_offset<ValueTile>(token) +
                                  chunk / kSwizzleChunks * kColumnBytes + offset);
}

// Word `word` of an unaligned row of V.
struct RowWord {
  u32 words[1];
};
__device__ inline RowWord* row_word_at(unsigned char* tile, int warp, int warp_token, int word,
                                       const RowShifts& shifts) {
  const int parity = warp_token % 2;
  const int step = warp_token / kStepTokens;
  const u32 offset = unaligned_offset<ValueTile>(warp, parity, warp_token % kStepTokens / 2) +
                     step * kUnalignedStep<ValueTile> + shifts.of(1, parity);
  return reinterpret_cast<RowWord*>(tile + offset) + word;
}

// Word `word` of the block scales of token `warp_token` of a warp, behind a V tile.
struct ScaleWord {
  u32 words[1];
};
__device__ inline ScaleWord* scale_word_at(unsigned char* tile, int warp, int warp_token,
                                           int word) {
  return reinterpret_cast<ScaleWord*>(tile + scale_row_offset(warp, warp_token)) + word;
}

// What decides whether V of a token is finite: its chunks, or words if it is unaligned, or its
// block scales, since e2m1 has neither NaN nor Inf.
template <bool kAreScales, bool kAreUnaligned = false>
struct FiniteParts {
  using Part = Chunk;
  static constexpr int kCount = kValueRowBytes / kDimParts / kChunkBytes;  // of a warp
  __device__ static Part* at(unsigned char* tile, int warp, int warp_token, int part,
                             const RowShifts&) {
    return chunk_at(tile, warp, warp_token, part);
  }
};
template <>
struct FiniteParts<true, false> {
  using Part = ScaleWord;
  static constexpr int kCount = kScaleRowBytes / sizeof(Part);
  __device__ static Part* at(unsigned char* tile, int warp, int warp_token, int part,
                             const RowShifts&) {
    return scale_word_at(tile, warp, warp_token, part);
  }
};
template <>
struct FiniteParts<false, true> {
  using Part = RowWord;
  static constexpr int kCount = kValueRowBytes / kDimParts / sizeof(Part);
  __device__ static Part* at(unsigned char* tile, int warp, int warp_token, int part,
                             const RowShifts& shifts) {
    return row_word_at(tile, warp, warp_token, part, shifts);
  }
};

// Clears V of this warp's tokens that are masked for some rows: whole tokens that no row attends
// to, and non-finite elements of the others. Returns whether it cleared a non-finite element, which
// restore_nonfinite then adds back.
template <typename AnyParams>
__device__ inline bool clear_masked(const AnyParams& params, const WorkItem& work, int first_token,
                                    int warp, unsigned char* tile) {
  using Parts = FiniteParts<kHasBlockScales, kHasUnalignedRows>;
  using Part = Parts::Part;
  RowShifts shifts;
  if constexpr (kHasUnalignedRows) shifts = RowShifts(params, work.kv_head);
  const int begin = part_of_warp(warp) * Parts::kCount;
  const KvRange unmasked = {work.unmasked_kv_begin, work.unmasked_kv_end};
  const KvRange attended = {work.kv_begin, work.kv_end};
  bool has_nonfinite = false;
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int i = lane_index(); i < kWarpTokens * Parts::kCount; i += kWarpLanes) {
    const int token = first_token + i / Parts::kCount;
    if (unmasked.contains(token)) continue;
    Part* part = Parts::at(tile, warp, i / Parts::kCount, begin + i % Parts::kCount, shifts);
    Part cleared{};
    if (attended.contains(token)) {
      const Part stored = *part;
      cleared = zero_nonfinite(stored);
#pragma unroll
      for (u32 word = 0; word < sizeof(Part) / 4; ++word)
        has_nonfinite |= cleared.words[word] != stored.words[word];
    }
    *part = cleared;
  }
  // Orders these writes before the next TMA write to the stage.
  fence_proxy_async();
  __syncwarp();  // the cleared V is visible to all lanes
  return __any_sync(~0u, has_nonfinite);
}

// Clears V of a sparse call from token `end` of the warp on: no row attends to these. Gathered
// tiles have zeros there.
__device__ inline void clear_sparse(int end, int warp, unsigned char* tile) {
  using Parts = FiniteParts<false>;
#pragma unroll 1
  for (int i = lane_index() + end * Parts::kCount; i < kWarpTokens * Parts::kCount;
       i += kWarpLanes) {
    *Parts::at(tile, warp, i / Parts::kCount,
               part_of_warp(warp) * Parts::kCount + i % Parts::kCount, RowShifts{}) = Chunk{};
  }
  fence_proxy_async();
  __syncwarp();
}

// Rows that FiniteParts are of, in the cache. A template: without block scales, Params lacks them.
template <typename AnyParams>
__device__ inline PagedRows finite_rows(const AnyParams& params, int kv_head) {
  if constexpr (kHasBlockScales) {
    return {params.value_scales + kv_head * params.value_scale_head_stride,
            params.value_scale_page_stride, params.value_scale_token_stride};
  } else {
    return {params.value_cache + kv_head * params.value_head_stride, params.value_page_stride,
            params.value_token_stride};
  }
}

// Scale of the value of a token. A template: without token scales, Params lacks them.
template <typename AnyParams>
__device__ inline float value_scale_of(const AnyParams& params, int kv_head, int page, int slot) {
  if constexpr (kHasTokenScales) {
    const PagedRows scales{params.value_scales + kv_head * params.value_scale_head_stride,
                           params.value_scale_page_stride, params.value_scale_token_stride};
    return *reinterpret_cast<const float*>(scales.row_of(page, slot));
  }
  return 1.0f;
}

// Adds the non-finite elements of a token that is masked for some rows, if this row attends to it.
// Unweighted: times any probability they are the same.
__device__ inline float4 add_nonfinite(const Params& params, const WorkItem& work, int row, int dim,
                                       int token, float4 out) {
  if (!work.attends(params, row, token)) return out;
  const int page = work.value_page_ids(params)[token / kPageSize];
  if (!is_valid_page(page, params.num_pages)) return out;
  const PagedRows cached = finite_rows(params, work.kv_head);
  const unsigned char* element_row = cached.row_of(page, token % kPageSize);
  const float scale = value_scale_of(params, work.kv_head, page, token % kPageSize);
  float* sums[4] = {&out.x, &out.y, &out.z, &out.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float element = element_at(element_row, dim + i) * scale;
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
