// Loads of a work item: Q by the consumer warps, K and V tiles by the producer warp.

#pragma once

#include "common/barriers.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "convert_q.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/load.cuh"
#include "ptx/sync.cuh"
#include "shared_memory.cuh"
#include "sparse_boxes.cuh"
#include "work_item.cuh"
#include "work_pipeline.cuh"

// Q is loaded in fragment order: into registers, or into shared memory for all warps. Q in
// registers is prefetched before its work item begins, because latency is high while memory is
// busy.
__device__ inline void load_q_row(const Params& params, const WorkItem& work, int group,
                                  QFragment& fragment) {
  const int row = q_fragment_row(group);
  const bool is_row = row < work.rows;
  const i64 token = work.first_query + (is_row ? work.query_of(params, row) : 0);
  const int head = is_row ? work.head_of(params, row) : 0;
  const u16* source = params.query + token * params.query_stride + head * params.query_head_stride;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    fragment[k] = is_row ? load_q_fragment(source, k) : make_uint2(0, 0);
  }
}

struct QueryFragments {
  static constexpr bool kPrefetchesQ = true;

  QFragment rows[kRowGroups];
  QFragment next_rows[kRowGroups];  // of the next item, in flight
  float inverse_scale[kRowGroups];  // of this lane's row of each group

  __device__ explicit QueryFragments(const SharedMemoryPlan&) {}

  // Issues the loads of all rows; every warp calls it.
  __device__ void prefetch(const Params& params, const WorkItem& work, int) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) load_q_row(params, work, n, next_rows[n]);
  }

  __device__ void load(const Params&, const WorkItem&, int, SharedMemoryPlan&) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) rows[n][k] = next_rows[n][k];
      inverse_scale[n] = convert_q_row(rows[n]);
    }
  }

  __device__ uint2 at(int group, int k) const { return rows[group][k]; }

  // Inverse Q scale of the row in column `r` of a lane's accumulators.
  __device__ float inverse_scale_of(int group, int r) const {
    return kScalesQ ? __shfl_sync(~0u, inverse_scale[group], row_of(0, r) * 4) : 1.0f;
  }
};

struct SharedQuery {
  static constexpr bool kPrefetchesQ = false;

  const SharedMemoryPlan& smem;

  __device__ explicit SharedQuery(const SharedMemoryPlan& target) : smem(target) {}

  __device__ void prefetch(const Params&, const WorkItem&, int) {}

  // Called by all consumers; the first kRowGroups warps load a row group each.
  __device__ void load(const Params& params, const WorkItem& work, int warp,
                       SharedMemoryPlan& target) {
    // No warp may still read the previous Q. Consumers that combine have synced since the main
    // loop; publish_partials does not sync them.
    if constexpr (kUsesEpilogueWarps)
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    if (warp < kRowGroups) {
      QFragment fragment;
      load_q_row(params, work, warp, fragment);
      const float inverse_scale = convert_q_row(fragment);
      if (lane_index() % 4 == 0) target.query_inverse_scales[q_fragment_row(warp)] = inverse_scale;
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) target.query[warp][k][lane_index()] = fragment[k];
    }
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  }

  __device__ uint2 at(int group, int k) const { return smem.query[group][k][lane_index()]; }

  __device__ float inverse_scale_of(int group, int r) const {
    return kScalesQ ? smem.query_inverse_scales[row_of(group, r)] : 1.0f;
  }
};

template <bool kInRegs>
struct QueryChoice {
  using Type = QueryFragments;
};
template <>
struct QueryChoice<false> {
  using Type = SharedQuery;
};
using Query = QueryChoice<kQueryInRegs>::Type;

// K and V come through the TMA pipeline. Each lane issues one TMA box of every
// kKvBlocksPerWindow-th KV block, and prefetches its page id.
constexpr int kKvBlocksPerWindow = kWarpLanes / kBoxesPerKvBlock;

struct KvTmaBoxes {
  const int* page_ids;  // block table of the sequence
  const int* value_page_ids;  // that of its values; like the two below only if kSeparatePageIds
  int begin;  // boxes with a token that any row attends to
  int end;
  int box;  // of this lane, counted from the first token of the sequence
  int page;  // page id of `box`
  int next_page;  // page id of the lane's next box
  int value_page;
  int next_value_page;
  SparseBox sparse, next_sparse;  // of a sparse call, instead of the page ids

  __device__ KvTmaBoxes() = default;
  __device__ KvTmaBoxes(const Params& params, const WorkItem& work)
      : page_ids(work.page_ids(params)),
        begin(work.kv_begin / kBoxTokens),
        end(ceil_div(work.kv_end, kBoxTokens)),
        box(work.first_kv_block * kBoxesPerKvBlock + lane_index()) {
    if constexpr (kIsSparse) {
      sparse = sparse_box(params, work, box);
      next_sparse = sparse_box(params, work, box + kWarpLanes);
      return;
    }
    page = read(page_ids, box);
    next_page = read(page_ids, box + kWarpLanes);
    if constexpr (kSeparatePageIds) {
      value_page_ids = work.value_page_ids(params);
      value_page = read(value_page_ids, box);
      next_value_page = read(value_page_ids, box + kWarpLanes);
    }
  }

  __device__ bool is_inside(int index) const { return index >= begin && index < end; }

  __device__ int read(const int* ids, int index) const {
    return is_inside(index) ? ids[index * kBoxTokens / kPageSize] : 0;
  }

  __device__ void advance(const Params& params, const WorkItem& work) {
    box += kWarpLanes;
    if constexpr (kIsSparse) {
      sparse = next_sparse;
      next_sparse = sparse_box(params, work, box + kWarpLanes);
      return;
    }
    page = next_page;
    next_page = read(page_ids, box + kWarpLanes);
    if constexpr (kSeparatePageIds) {
      value_page = next_value_page;
      next_value_page = read(value_page_ids, box + kWarpLanes);
    }
  }

  // Page of the box of K, or of V.
  __device__ int page_of(bool is_value) const {
    if constexpr (kIsSparse) return sparse.page;
    return kSeparatePageIds && is_value ? value_page : page;
  }

  // Whether the lane's box is loaded.
  __device__ bool is_loaded() const { return kIsSparse ? sparse.tokens > 0 : is_inside(box); }

  // Transaction bytes of a tile of a KV block: fully masked boxes are not loaded.
  __device__ u32 bytes_of(int kv_block, int box_bytes) const {
    const int first = max(kv_block * kBoxesPerKvBlock, begin);
    return static_cast<u32>(min((kv_block + 1) * kBoxesPerKvBlock, end) - first) * box_bytes;
  }
};

// Copies a row of scales to shared memory, or zeroes it.
template <int kBytes>
__device__ inline void copy_scale_row(u32 target, const void* source, bool exists) {
  const u32 bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 4) cp_async_ca_4(target, source, bytes);
  if constexpr (kBytes == 8) cp_async_ca_8(target, source, bytes);
  if constexpr (kBytes == 16) cp_async_cg_16(target, source, bytes);
}

// Scales of the tokens of TMA boxes, of their blocks or of themselves, copied behind their tiles by
// all lanes: TMA would need strides of 16 bytes. Every lane has the addresses of its box, so that a
// row takes few instructions of the one producer warp.
struct KvScales {
  static constexpr int kCopies = kBlockN * kKvHeadsPerCta / kWarpLanes;  // of a lane for a tile
  static constexpr int kCopyBytes = kWarpLanes / kKvHeadsPerCta * kScaleRowBytes;  // of a kv head
  static constexpr int kBoxRows = kBoxTokens * kKvHeadsPerCta;

  u64 boxes[2];  // scales of the first token of this lane's box, of K and of V
  u32 existing[kSeparatePageIds ? 2 : 1];  // boxes of the lanes that exist, of K, or of K and of V

  __device__ KvScales() = default;
  // A template: without scales, Params lacks these parameters.
  template <typename ScaleParams>
  __device__ KvScales(const ScaleParams& params, const KvTmaBoxes& tma_boxes, int kv_head) {
    const bool is_inside = tma_boxes.is_inside(tma_boxes.box);
    int page = 0;
    int slot = 0;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      if (kv == 0 || kSeparatePageIds) {
        const int own_page = tma_boxes.page_of(kv == 1);
        const bool exists = is_inside && is_valid_page(own_page, params.num_pages);
        existing[kv] = __ballot_sync(~0u, exists);
        page = exists ? own_page : 0;
        slot = exists ? tma_boxes.box * kBoxTokens % kPageSize : 0;
      }
      const PagedRows rows = rows_of(params, kv);
      boxes[kv] =
          reinterpret_cast<u64>(rows.row_of(page, slot) + kv_head * head_stride(params, kv));
    }
  }

  template <typename ScaleParams>
  __device__ static PagedRows rows_of(const ScaleParams& params, int kv) {
    return kv == 0 ? PagedRows{params.key_scales, params.key_scale_page_stride,
                               params.key_scale_token_stride}
                   : PagedRows{params.value_scales, params.value_scale_page_stride,
                               params.value_scale_token_stride};
  }

  template <typename ScaleParams>
  __device__ static i64 head_stride(const ScaleParams& params, int kv) {
    return kv == 0 ? params.key_scale_head_stride : params.value_scale_head_stride;
  }

  // Of K or V of the KV block whose first box is that of lane `first_lane`; arrives at `full` when
  // the copies are complete.
  template <typename ScaleParams>
  __device__ void load(const ScaleParams& params, int kv, int first_lane, unsigned char* target,
                       u32 full) const {
    const PagedRows rows = rows_of(params, kv);
    const i64 to_head = head_stride(params, kv);
    const int row = lane_index() % kBoxRows;
    const u64 own = row / kKvHeadsPerCta * rows.token_stride + row % kKvHeadsPerCta * to_head;
    target += lane_index() % kKvHeadsPerCta * kScaleHeadBytes +
              lane_index() / kKvHeadsPerCta * kScaleRowBytes;
    const u64 alignment =
        reinterpret_cast<u64>(rows.rows) | rows.page_stride | rows.token_stride | to_head;
    if (!kHasTokenScales && alignment % kScaleRowBytes != 0) {
      load_bytes(kv, first_lane, own, rows.token_stride, target, full);
      return;
    }
    const u32 address = shared_address(target);
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      copy_scale_row<kScaleRowBytes>(
          address + copy * kCopyBytes,
          reinterpret_cast<const void*>(source_of(kv, first_lane, copy, own, rows.token_stride)),
          exists(kv, first_lane, copy));
    }
    cp_async_mbarrier_arrive_noinc(full);
  }

  // The same for rows that are not aligned to their size.
  __device__ void load_bytes(int kv, int first_lane, u64 own, i64 token_stride,
                             unsigned char* target, u32 full) const {
#pragma unroll 1
    for (int copy = 0; copy < kCopies; ++copy) {
      const unsigned char* source = reinterpret_cast<const unsigned char*>(
          source_of(kv, first_lane, copy, own, token_stride));
      const bool is_read = exists(kv, first_lane, copy);
#pragma unroll 1
      for (int i = 0; i < kScaleRowBytes; ++i) {
        target[copy * kCopyBytes + i] = is_read ? source[i] : 0;
      }
    }
    mbarrier_arrive(full);
  }

  // The lane whose box has the row of copy `copy`; the address of the row.
  __device__ static int lane_of(int first_lane, int copy) {
    return first_lane + copy * kWarpLanes / kBoxRows + lane_index() / kBoxRows;
  }
  __device__ u64 source_of(int kv, int first_lane, int copy, u64 own, i64 token_stride) const {
    const u64 box = __shfl_sync(~0u, boxes[kv], lane_of(first_lane, copy));
    return box + own + copy * kWarpLanes % kBoxRows / kKvHeadsPerCta * token_stride;
  }
  __device__ bool exists(int kv, int first_lane, int copy) const {
    return (existing[kSeparatePageIds ? kv : 0] >> lane_of(first_lane, copy) & 1) != 0;
  }
};

__device__ inline void load_work(const Params& params, const WorkItem& work, KvTmaBoxes& boxes,
                                 SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const int end = work.first_kv_block + work.num_kv_blocks;
  const int lane_block = lane_index() / kBoxesPerKvBlock;
  const u32 box_of_lane = lane_index() % kBoxesPerKvBlock;
  const u64 cache_hint = kv_cache_hint(params.m_tiles);
  KvScales kv_scales;
  if constexpr (kHasScales) kv_scales = KvScales(params, boxes, work.kv_head);
#pragma unroll 1
  for (int kv_block = work.first_kv_block, in_window = 0; kv_block < end; ++kv_block) {
    const bool issues_copy = lane_block == in_window && boxes.is_loaded();
    u32 num_sparse = 0;
    if constexpr (kIsSparse) num_sparse = __popc(__ballot_sync(~0u, issues_copy));
    const int slot = boxes.box * kBoxTokens % kPageSize;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const u32 full = shared_address(&smem.kv_full[kv_pipe.index]);
      const int box_bytes = kv == 0 ? KeyTile::kBoxBytes : ValueTile::kBoxBytes;
      wait(smem.kv_empty[kv_pipe.index], kv_pipe.phase ^ 1);
      if constexpr (kIsSparse) {
        if (kv == 0 && lane_block == in_window) {
          smem.sparse_tokens[kv_pipe.index][box_of_lane] = boxes.sparse.tokens;
        }
        __syncwarp();  // consumers read it after the arrival
      }
      if (lane_index() == 0) {
        mbarrier_arrive_expect_tx(
            full, kIsSparse ? num_sparse * box_bytes : boxes.bytes_of(kv_block, box_bytes));
      }
      __syncwarp();
      if (issues_copy) {
        const u32 target = shared_address(smem.kv[kv_pipe.index]) + box_of_lane * box_bytes;
        const int page = boxes.page_of(kv == 1);
        cp_async_bulk_tensor(target, kv == 0 ? &params.key_map : &params.value_map, full,
                             cache_hint, 0, slot, 0, work.kv_head, page);
      }
      if constexpr (kHasScales) {
        kv_scales.load(params, kv, in_window * kBoxesPerKvBlock,
                       smem.kv[kv_pipe.index] + kScalesOffset, full);
      }
      __syncwarp();
      kv_pipe.advance();
    }
    if (++in_window == kKvBlocksPerWindow) {
      in_window = 0;
      boxes.advance(params, work);
      if constexpr (kHasScales) kv_scales = KvScales(params, boxes, work.kv_head);
    }
  }
}

// Loads the KV blocks of all work items.
__device__ inline void producer_loop(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  WorkItem work;
  KvTmaBoxes boxes;
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    work = work_pipeline.at(0, 0);
    pdl_wait();
    boxes = KvTmaBoxes(params, work);
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  pdl_launch_dependents();
  PipelineState<kStages> kv_pipe;
#pragma unroll 1
  for (u32 work_idx = 0; !work.is_none();) {
    load_work(params, work, boxes, smem, kv_pipe);
    work_pipeline.release(work_idx);
    work_pipeline.wait_full(++work_idx);
    work = work_pipeline.at(work_idx, 0);
    boxes = KvTmaBoxes(params, work);
  }
}

// Prefetches the block tables of all sequences into L2. The consumers call it: one cache line per
// thread, so it covers at most as many lines as there are consumer threads in the grid.
__device__ inline void prefetch_block_table(const Params& params, int thread) {
  if constexpr (kIsSparse) return;  // it reads little of them
  constexpr int kIdsPerCacheLine = 32;
  const u32 lines_per_seq = static_cast<u32>(ceil_div(params.max_pages, kIdsPerCacheLine));
  const u32 cache_line = blockIdx.x * kConsumerThreads + thread;
  if (lines_per_seq == 0) return;
  const u32 seq_idx = cache_line / lines_per_seq;
  if (seq_idx >= params.num_seqs) return;
  prefetch_l2(params.block_tables + seq_idx * static_cast<i64>(params.block_tables_stride) +
              (cache_line - seq_idx * lines_per_seq) * kIdsPerCacheLine);
}
