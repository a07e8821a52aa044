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
    end = min((work.first_kv_block + work.num_kv_blocks) * kBlockN, work.kv_end);
    indices = block_indices_of(params, work.first_query, work.kv_head);
    if constexpr (kSeparatePageIds) {
      value_indices = value_tables_of(params) + work.first_query * params.indices_stride;
    }
    read_indices(work.first_kv_block);  // before the request, which it does not depend on
    const SparseSeq seq = sparse_seq_of(params, work.first_query);
    table = params.block_tables + seq.seq_idx * static_cast<i64>(params.block_tables_stride);
    table_end = seq.kv_end;
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

// Copies in flight between two waits for shuffled addresses.
constexpr int kCopiesPerStep = kSeparatePageIds ? 4 : 8;

// Copies the rows of the warp's tokens to a tile; `exist` has a bit for each.
template <typename Tile>
__device__ inline void copy_rows(const u64 (&lane_rows)[kTokensPerLane],
                                 const u32 (&exist)[kTokensPerLane], u32 target) {
  constexpr int kRowChunks = 2 * Tile::kChunkPairs;
  constexpr int kRowLanes = row_lanes(kRowChunks);
  constexpr int kCopyTokens = kWarpLanes / kRowLanes;  // of a copy
  constexpr int kRowCopies = (kRowChunks + kRowLanes - 1) / kRowLanes;
  // Tokens so far apart have the same swizzle, which is the XOR of those of the parts of their sum.
  constexpr int kPeriod = kCopyTokens < 8 ? 8 : kCopyTokens;
  constexpr int kStepCopies = kCopiesPerStep * kCopyTokens / kRowCopies;
  constexpr int kStep = kStepCopies < kPeriod      ? kPeriod
                        : kStepCopies < kWarpLanes ? kStepCopies
                                                   : kWarpLanes;  // tokens of a step
  constexpr int kSwizzleChunks = kSwizzleBytes / kChunkBytes;
  const int token_of_copy = lane_index() / kRowLanes;
  const int chunk = lane_index() % kRowLanes;
  const u32 in_line =
      static_cast<u32>(chunk % kSwizzleChunks * kChunkBytes) ^ swizzle_of(token_of_copy);
  target += (first_token_of_producer() + token_of_copy) * kSwizzleBytes +
            chunk / kSwizzleChunks * kColumnBytes;
#pragma unroll
  for (int i = 0; i < kTokensPerLane; ++i) {
#pragma unroll 1
    for (int first = 0; first < kWarpLanes; first += kStep) {
      const u32 bits = exist[i] >> first + token_of_copy;
      const u32 step_target = target + (i * kWarpLanes + first) * kSwizzleBytes;
      u64 rows[kStep / kCopyTokens];
#pragma unroll
      for (int copy = 0; copy < kStep / kCopyTokens; ++copy) {
        rows[copy] = __shfl_sync(~0u, lane_rows[i], first + copy * kCopyTokens + token_of_copy);
      }
#pragma unroll
      for (int copy = 0; copy < kStep / kCopyTokens; ++copy) {
        const int token = copy * kCopyTokens;
        const u32 bytes = (bits >> token & 1) * kChunkBytes;
#pragma unroll
        for (int lanes = 0; lanes < kRowChunks; lanes += kRowLanes) {
          if (kRowChunks % kRowLanes != 0 && chunk >= kRowChunks) continue;
          cp_async_cg_16(step_target + (in_line ^ swizzle_of(token)) + token * kSwizzleBytes +
                             lanes / kSwizzleChunks * kColumnBytes,
                         reinterpret_cast<const void*>(rows[copy] + (chunk + lanes) * kChunkBytes),
                         bytes, kEvictFirst);
        }
      }
    }
  }
}

// Addresses of the rows of a lane's tokens; those that are skipped have page and slot 0. A page id
// that exists is not negative: as an unsigned number it takes half the instructions.
struct LaneRows {
  u64 rows[kTokensPerLane];

  __device__ LaneRows(const PagedRows& cache, const LaneTokens& lane_tokens) {
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const u64 page = static_cast<u32>(lane_tokens.tokens[i].page);
      const u64 slot = static_cast<u32>(lane_tokens.tokens[i].slot);
      rows[i] = reinterpret_cast<u64>(cache.rows) + page * static_cast<u64>(cache.page_stride) +
                slot * static_cast<u64>(cache.token_stride);
    }
  }
};

// Rows of scales of a work item, of K and of V.
struct GatheredScales {
  PagedRows rows[2];
  bool are_aligned[2];

  __device__ GatheredScales() = default;
  // A template: without scales, Params lacks these parameters.
  template <typename ScaleParams>
  __device__ GatheredScales(const ScaleParams& params, const WorkItem& work) {
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const i64 head_stride = scale_head_stride(params, kv);
      rows[kv] = scale_rows(params, kv);
      are_aligned[kv] = has_aligned_scales(rows[kv], head_stride);
      rows[kv].rows += work.kv_head * head_stride;
    }
  }

  // Copies those of the warp's tokens, each lane those of its own.
  __device__ void copy(int kv, const LaneTokens& lane_tokens, const u32 (&exist)[kTokensPerLane],
                       unsigned char* target) const {
    const bool is_key = kv == 0;
    const PagedRows cache = is_key ? rows[0] : rows[1];
    const bool is_aligned = is_key ? are_aligned[0] : are_aligned[1];
    const LaneRows lane_rows(cache, lane_tokens);
    target += (first_token_of_producer() + lane_index()) * kScaleRowBytes;
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      const bool exists = (exist[i] >> lane_index() & 1) != 0;
      const unsigned char* source = reinterpret_cast<const unsigned char*>(lane_rows.rows[i]);
      unsigned char* place = target + i * kWarpLanes * kScaleRowBytes;
      if (is_aligned) {
        copy_scale_row<kScaleRowBytes>(shared_address(place), source, exists);
      } else {
#pragma unroll 1
        for (int byte = 0; byte < kScaleRowBytes; ++byte) place[byte] = exists ? source[byte] : 0;
      }
    }
  }
};

// Loads a tile of K, or of V.
template <typename Tile>
__device__ inline void load_tile(const PagedRows& cache, int kv, const LaneTokens& lane_tokens,
                                 const u32 (&exist)[kTokensPerLane], const GatheredScales& scales,
                                 SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const LaneRows lane_rows(cache, lane_tokens);
  unsigned char* tile = smem.kv[kv_pipe.index];
  wait(smem.kv_empty[kv_pipe.index], kv_pipe.phase ^ 1);
  if (kv == 0 && lane_index() == 0) {
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      smem.sparse_tokens[kv_pipe.index][first_token_of_producer() / kWarpLanes + i] = exist[i];
    }
  }
  __syncwarp();
  copy_rows<Tile>(lane_rows.rows, exist, shared_address(tile));
  if constexpr (kHasScales) scales.copy(kv, lane_tokens, exist, tile + kScalesOffset);
  cp_async_mbarrier_arrive_noinc(shared_address(&smem.kv_full[kv_pipe.index]));
  __syncwarp();  // all lanes have stored
  if (lane_index() == 0) arrive(smem.kv_full[kv_pipe.index]);
  __syncwarp();
  kv_pipe.advance();
}

__device__ inline void load_work(const Params& params, const WorkItem& work, KvGather& gather,
                                 SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const PagedRows key_rows = {params.key_cache + work.kv_head * params.key_head_stride,
                              params.key_page_stride, params.key_token_stride};
  const PagedRows value_rows = {params.value_cache + work.kv_head * params.value_head_stride,
                                params.value_page_stride, params.value_token_stride};
  GatheredScales scales;
  if constexpr (kHasScales) scales = GatheredScales(params, work);
  const int end = work.first_kv_block + work.num_kv_blocks;
#pragma unroll 1
  for (int kv_block = work.first_kv_block; kv_block < end; ++kv_block) {
    LaneTokens keys = gather.keys;
    LaneTokens values = kSeparatePageIds ? gather.values : keys;
    gather.advance(kv_block + 1);
    u32 exist[kTokensPerLane];
#pragma unroll
    for (int i = 0; i < kTokensPerLane; ++i) {
      // A token without a key has no value, and the other way round.
      const bool exists = keys.exists(params, i) && (!kSeparatePageIds || values.exists(params, i));
      exist[i] = __ballot_sync(~0u, exists);
      if (!exists) keys.tokens[i] = {0, 0};
      if (!exists || !kSeparatePageIds) values.tokens[i] = keys.tokens[i];
    }
    // Not unrolled where one code serves both, so that few instructions are fetched in a small
    // call.
    constexpr bool kHasEqualTiles = kKeyRowBytes == kValueRowBytes;
#pragma unroll(kHasEqualTiles ? 1 : 2)
    for (int kv = 0; kv < 2; ++kv) {
      const bool is_key = kv == 0;
      const PagedRows rows = is_key ? key_rows : value_rows;
      if (kHasEqualTiles || is_key) {
        LaneTokens tokens = keys;
        if constexpr (kSeparatePageIds) {
#pragma unroll
          for (int i = 0; i < kTokensPerLane; ++i) {
            tokens.tokens[i].page = is_key ? keys.tokens[i].page : values.tokens[i].page;
            tokens.tokens[i].slot = is_key ? keys.tokens[i].slot : values.tokens[i].slot;
          }
        }
        load_tile<KeyTile>(rows, kv, tokens, exist, scales, smem, kv_pipe);
      } else {
        load_tile<ValueTile>(rows, kv, values, exist, scales, smem, kv_pipe);
      }
    }
  }
}
