// Loads of K and V token by token: the producer warps gather the rows of the tokens that the
// indices of a sparse call name, by cp.async, in the layout of TMA boxes. Rows of tokens that are
// skipped become zero.

#pragma once

#include "common/barriers.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/sparse_blocks.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/cp_async.cuh"
#include "scale_rows.cuh"
#include "shared_memory.cuh"
#include "work_item.cuh"

// A lane has one of every kWarpLanes tokens of its warp, which are adjacent.
constexpr int kTokensPerWarp = kBlockN / kProducerWarps;
constexpr int kTokensPerLane = kTokensPerWarp / kWarpLanes;
static_assert(kTokensPerLane * kWarpLanes == kTokensPerWarp, "lanes have as many tokens");

__device__ inline int first_token_of_producer() {
  return (warp_index() - kFirstProducerWarp) * kTokensPerWarp;
}

// Tokens of this lane in the cache. Page ids are as loaded, so that nothing waits for them before
// they are used.
struct LaneTokens {
  SparseToken tokens[kTokensPerLane];

  // `indices` are those of the tokens; one that names no token of the request is skipped. Without a
  // table they are tokens of the cache.
  __device__ void read(const int* table, int kv_end, const int (&indices)[kTokensPerLane]) {
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int index = indices[i];
      const bool is_read = index >= 0 && index < kv_end;
      const int page = index / kPageSize;
      tokens[i].page = is_read ? (table == nullptr ? page : table[page]) : -1;
      tokens[i].slot = index % kPageSize;
    }
  }

  __device__ bool exists(const Params& params, int i) const {
    return is_valid_page(tokens[i].page, params.num_pages);
  }
};

// The tokens of a work item, a KV block at a time. Indices are read two KV blocks ahead, page ids
// one, so that no copy waits for one of the two dependent loads.
struct KvGather {
  const int* indices;
  const int* value_indices;  // like the next two only if kSeparatePageIds
  LaneTokens values;  // of the next KV block
  int next_value_indices[kTokensPerLane];
  const int* table;
  int table_end;  // of the tokens that an index may name
  int end;  // of the indices of this split
  LaneTokens keys;  // of the next KV block
  int next_indices[kTokensPerLane];  // of the KV block after it

  __device__ KvGather() = default;
  __device__ KvGather(const Params& params, const WorkItem& work) {
    if (work.is_none()) return;
    const SparseSeq seq = sparse_seq_of(params, work.first_query);
    table = params.block_tables + seq.seq_idx * static_cast<i64>(params.block_tables_stride);
    table_end = seq.kv_end;
    end = min((work.first_kv_block + work.num_kv_blocks) * kBlockN, work.kv_end);
    indices = block_indices_of(params, work.first_query, work.kv_head);
    if constexpr (kSeparatePageIds) {
      value_indices = value_tables_of(params) + work.first_query * params.indices_stride;
    }
    read_indices(work.first_kv_block);
    read_tokens();
    read_indices(work.first_kv_block + 1);
  }

  __device__ void read_indices(int kv_block) {
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const int at = kv_block * kBlockN + first_token_of_producer() + i * kWarpLanes + lane_index();
      next_indices[i] = at < end ? indices[at] : -1;
      if constexpr (kSeparatePageIds) next_value_indices[i] = at < end ? value_indices[at] : -1;
    }
  }

  __device__ void read_tokens() {
    keys.read(table, table_end, next_indices);
    if constexpr (kSeparatePageIds) values.read(table, table_end, next_value_indices);
  }

  // Goes on to `kv_block`, after the loads of the one before have been issued.
  __device__ void advance(int kv_block) {
    read_tokens();
    read_indices(kv_block + 1);
  }
};
using KvSource = KvGather;

// Lanes that copy a row together, a power of two.
__device__ constexpr int row_lanes(int chunks) {
  int lanes = 1;
  while (lanes < chunks && lanes < kWarpLanes) lanes *= 2;
  return lanes;
}

// Copies the rows of the warp's tokens to a tile; `exist` has a bit for each.
template <typename Tile>
__device__ inline void copy_rows(const Params& params, const PagedRows& rows,
                                 const LaneTokens& lane_tokens, const u32 (&exist)[kTokensPerLane],
                                 u32 target) {
  constexpr int kRowChunks = 2 * Tile::kChunkPairs;
  constexpr int kRowLanes = row_lanes(kRowChunks);
  constexpr int kCopyTokens = kWarpLanes / kRowLanes;  // of a copy
  // Tokens so far apart have the same swizzle, which is the XOR of those of the parts of their sum.
  constexpr int kPeriod = kCopyTokens < 8 ? 8 : kCopyTokens;
  constexpr int kSwizzleChunks = kSwizzleBytes / kChunkBytes;
  const int token_of_copy = lane_index() / kRowLanes;
  const int chunk = lane_index() % kRowLanes;
  const u32 in_line =
      static_cast<u32>(chunk % kSwizzleChunks * kChunkBytes) ^ swizzle_of(token_of_copy);
  target += (first_token_of_producer() + token_of_copy) * kSwizzleBytes +
            chunk / kSwizzleChunks * kColumnBytes;
#pragma unroll
  for (int i = 0; i < kTokensPerLane; ++i) {
    const SparseToken& own = lane_tokens.tokens[i];
    const bool exists = lane_tokens.exists(params, i);
    const u64 lane_row =
        reinterpret_cast<u64>(rows.row_of(exists ? own.page : 0, exists ? own.slot : 0));
#pragma unroll 1
    for (int first = 0; first < kWarpLanes; first += kPeriod) {
      const u32 bits = exist[i] >> first + token_of_copy;
#pragma unroll
      for (int token = 0; token < kPeriod; token += kCopyTokens) {
        const u64 row = __shfl_sync(~0u, lane_row, first + token + token_of_copy);
        const u32 bytes = (bits >> token & 1) * kChunkBytes;
#pragma unroll
        for (int lanes = 0; lanes < kRowChunks; lanes += kRowLanes) {
          if (kRowChunks % kRowLanes != 0 && chunk >= kRowChunks) continue;
          cp_async_cg_16(target + (i * kWarpLanes + first + token) * kSwizzleBytes +
                             lanes / kSwizzleChunks * kColumnBytes + (in_line ^ swizzle_of(token)),
                         reinterpret_cast<const void*>(row + (chunk + lanes) * kChunkBytes), bytes,
                         kEvictFirst);
        }
      }
    }
  }
}

// Copies the scales of the warp's tokens, each lane those of its own.
template <typename ScaleParams>
__device__ inline void copy_scales(const ScaleParams& params, const WorkItem& work, int kv,
                                   const LaneTokens& lane_tokens,
                                   const u32 (&exist)[kTokensPerLane], unsigned char* target) {
  const i64 head_stride = scale_head_stride(params, kv);
  PagedRows rows = scale_rows(params, kv);
  const bool is_aligned = has_aligned_scales(rows, head_stride);
  rows.rows += work.kv_head * head_stride;
#pragma unroll
  for (int i = 0; i < kTokensPerLane; ++i) {
    const SparseToken& own = lane_tokens.tokens[i];
    const bool exists = (exist[i] >> lane_index() & 1) != 0;
    const unsigned char* source = rows.row_of(exists ? own.page : 0, exists ? own.slot : 0);
    unsigned char* place =
        target + (first_token_of_producer() + i * kWarpLanes + lane_index()) * kScaleRowBytes;
    if (is_aligned) {
      copy_scale_row<kScaleRowBytes>(shared_address(place), source, exists);
    } else {
#pragma unroll 1
      for (int byte = 0; byte < kScaleRowBytes; ++byte) place[byte] = exists ? source[byte] : 0;
    }
  }
}

// Loads a tile of K, or of V.
template <typename Tile>
__device__ inline void load_tile(const Params& params, const WorkItem& work, int kv,
                                 const LaneTokens& lane_tokens, const u32 (&exist)[kTokensPerLane],
                                 SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const PagedRows rows =
      kv == 0 ? PagedRows{params.key_cache + work.kv_head * params.key_head_stride,
                          params.key_page_stride, params.key_token_stride}
              : PagedRows{params.value_cache + work.kv_head * params.value_head_stride,
                          params.value_page_stride, params.value_token_stride};
  unsigned char* tile = smem.kv[kv_pipe.index];
  wait(smem.kv_empty[kv_pipe.index], kv_pipe.phase ^ 1);
  if (kv == 0 && lane_index() == 0) {
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      smem.sparse_tokens[kv_pipe.index][first_token_of_producer() / kWarpLanes + i] = exist[i];
    }
  }
  __syncwarp();
  copy_rows<Tile>(params, rows, lane_tokens, exist, shared_address(tile));
  if constexpr (kHasScales) {
    copy_scales(params, work, kv, lane_tokens, exist, tile + kScalesOffset);
  }
  cp_async_mbarrier_arrive_noinc(shared_address(&smem.kv_full[kv_pipe.index]));
  __syncwarp();  // all lanes have stored
  if (lane_index() == 0) arrive(smem.kv_full[kv_pipe.index]);
  __syncwarp();
  kv_pipe.advance();
}

__device__ inline void load_work(const Params& params, const WorkItem& work, KvGather& gather,
                                 SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const int end = work.first_kv_block + work.num_kv_blocks;
#pragma unroll 1
  for (int kv_block = work.first_kv_block; kv_block < end; ++kv_block) {
    const LaneTokens keys = gather.keys;
    const LaneTokens values = kSeparatePageIds ? gather.values : keys;
    gather.advance(kv_block + 1);
    u32 exist[kTokensPerLane];
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      // A token without a key has no value, and the other way round.
      const bool has_value = !kSeparatePageIds || values.exists(params, i);
      exist[i] = __ballot_sync(~0u, keys.exists(params, i) && has_value);
    }
    load_tile<KeyTile>(params, work, 0, keys, exist, smem, kv_pipe);
    load_tile<ValueTile>(params, work, 1, values, exist, smem, kv_pipe);
  }
}
