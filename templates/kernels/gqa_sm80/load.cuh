// Loads of Q, and of KV blocks by cp.async: each warp streams its own blocks of the paged cache
// into its stages.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "sparse_reader.cuh"
#include "work_item.cuh"

// Loads the CTA's query rows into shared memory.
__device__ inline void load_q(const Params& params, const WorkItem& work, SharedMemoryPlan& smem) {
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

// Scales of K and of V, of the kv head of a work item.
__device__ inline PagedRows key_scales(const Params& params, const WorkItem& work) {
  return {params.key_scales + work.kv_head * params.key_scale_head_stride,
          params.key_scale_page_stride, params.key_scale_token_stride};
}
__device__ inline PagedRows value_scales(const Params& params, const WorkItem& work) {
  return {params.value_scales + work.kv_head * params.value_scale_head_stride,
          params.value_scale_page_stride, params.value_scale_token_stride};
}

// Stages alternate: K of a KV block, its V, K of the warp's next block. Page ids are read one block
// ahead, so that no copy waits for them.
struct KvLoader {
  const Params& params;
  const WorkItem& work;
  const int* table;  // page ids of the sequence
  const int* value_table;  // those of its values; like the two below only if kSeparatePageIds
  int next_stage;
  int next_kv_block;
  int lane_page;  // of token lane_index() % kBlockN of the next block; -1 if it is not loaded
  int next_lane_page;  // of the block after it
  int value_lane_page;
  int next_value_lane_page;
  SparseReader sparse;  // of a sparse call, instead of the page ids

  __device__ KvLoader(const Params& params, const WorkItem& work)
      : params(params),
        work(work),
        table(work.page_ids(params)),
        next_stage(0),
        next_kv_block(work.first_kv_block + warp_index()) {
    if constexpr (kIsSparse) {
      sparse.begin(params, work, table, next_kv_block);
      return;
    }
    lane_page = load_lane_page(table, next_kv_block);
    next_lane_page = load_lane_page(table, next_kv_block + kWarps);
    if constexpr (kSeparatePageIds) {
      value_table = work.value_page_ids(params);
      value_lane_page = load_lane_page(value_table, next_kv_block);
      next_value_lane_page = load_lane_page(value_table, next_kv_block + kWarps);
    }
  }

  // Block table of load `stage_idx`.
  __device__ const int* table_of(int stage_idx) const {
    return kSeparatePageIds && stage_idx % 2 != 0 ? value_table : table;
  }

  __device__ int load_lane_page(const int* page_ids, int kv_block) const {
    const int token = kv_block * kBlockN + lane_index() % kBlockN;
    const bool is_read =
        kv_block < work.end_kv_block && token >= work.kv_begin && token < work.kv_end;
    return is_read ? page_ids[token / kPageSize] : -1;
  }

  // Place in its page of a token of the next block.
  __device__ int slot_of(int token) const { return (next_kv_block * kBlockN + token) % kPageSize; }

  // Copies `kBytes` of every token's row, from byte `offset` on, to the rows of a stage.
  template <int kBytes>
  __device__ void copy_rows(const PagedRows& rows, int own_page, int offset,
                            unsigned char* stage) const {
    constexpr bool kFillsChunks = kBytes % kChunkBytes == 0 && kStageRowBytes % kChunkBytes == 0;
    // Rows of a cache with token scales, such as [K, its scale, V, its scale], have any 4 bytes.
    constexpr int kCopyBytes = kHasTokenScales ? 4 : kFillsChunks ? kChunkBytes : 8;
    constexpr int kCopies = kBytes / kCopyBytes;
#pragma unroll 4  // more addresses at once would take registers from the O accumulators
    for (int first = 0; first < kBlockN * kCopies; first += kWarpLanes) {
      const int copy = first + lane_index();
      const int token = copy / kCopies;
      const int at = copy % kCopies * kCopyBytes;
      const int page = __shfl_sync(~0u, own_page, token % kBlockN);
      int sparse_slot = 0;
      if constexpr (kIsSparse) sparse_slot = __shfl_sync(~0u, sparse.current.slot, token % kBlockN);
      if (token >= kBlockN) continue;
      const bool exists = is_valid_page(page, params.num_pages);
      const int slot = kIsSparse ? sparse_slot : slot_of(token);
      const unsigned char* source = exists ? rows.row_of(page, slot) + offset + at : rows.rows;
      const u32 target = shared_address(stage) + token * kStageRowBytes + at;
      const u32 bytes = exists ? kCopyBytes : 0;
      if constexpr (kCopyBytes == 4) cp_async_ca_4(target, source, bytes);
      if constexpr (kCopyBytes == 8) cp_async_ca_8(target, source, bytes);
      if constexpr (kCopyBytes == 16) cp_async_cg_16(target, source, bytes);
    }
  }

  // Copies the scale of every token behind the rows of a stage; 0 of one that is not loaded.
  __device__ void copy_scales(const PagedRows& scales, int own_page, unsigned char* stage) const {
    const int token = lane_index();
    if (token >= kBlockN) return;
    const bool exists = is_valid_page(own_page, params.num_pages);
    const int slot = kIsSparse ? sparse.current.slot : slot_of(token);
    const unsigned char* source = exists ? scales.row_of(own_page, slot) : scales.rows;
    cp_async_ca_4(shared_address(stage) + kScalesOffset + token * kScaleBytes, source,
                  exists ? kScaleBytes : 0);
  }

  // Publishes the tokens of the next stage of a sparse call to the warp.
  __device__ void set_sparse_block(SharedMemoryPlan& smem) {
    lane_page = sparse.current.page;
    if (lane_index() < kBlockN) {
      sparse_block_of(smem, next_stage).pages[lane_index()] = sparse.current.page;
      sparse_block_of(smem, next_stage).slots[lane_index()] = sparse.current.slot;
    }
  }

  // Issues the copies of the next stage, if there is one. Always commits a cp.async group, so that
  // the number of groups to wait for is constant.
  __device__ void load_next(SharedMemoryPlan& smem) {
    if (next_kv_block < work.end_kv_block) {
      unsigned char* stage = stage_ptr(smem, next_stage);
      if (next_stage % 2 == 0) {
        const PagedRows keys{params.key_cache + work.kv_head * params.key_head_stride,
                             params.key_page_stride, params.key_token_stride};
        if constexpr (kIsSparse) set_sparse_block(smem);
        copy_rows<kStoredBytes>(keys, lane_page, 0, stage);
        if constexpr (kHasTokenScales) copy_scales(key_scales(params, work), lane_page, stage);
      } else {
        const PagedRows values{params.value_cache + work.kv_head * params.value_head_stride,
                               params.value_page_stride, params.value_token_stride};
        if constexpr (kIsSparse && kSeparatePageIds) {
          sparse.current = sparse.value;
          set_sparse_block(smem);
        }
        const int value_page = kSeparatePageIds && !kIsSparse ? value_lane_page : lane_page;
        copy_rows<kSliceBytes>(values, value_page, work.slice * kSliceBytes, stage);
        if constexpr (kHasTokenScales) copy_scales(value_scales(params, work), value_page, stage);
        next_kv_block += kWarps;
        if constexpr (kIsSparse) {
          sparse.advance(params, work, table, next_kv_block);
          ++next_stage;
          cp_async_commit_group();
          return;
        }
        lane_page = next_lane_page;
        next_lane_page = load_lane_page(table, next_kv_block + kWarps);
        if constexpr (kSeparatePageIds) {
          value_lane_page = next_value_lane_page;
          next_value_lane_page = load_lane_page(value_table, next_kv_block + kWarps);
        }
      }
      ++next_stage;
    }
    cp_async_commit_group();
  }
};
