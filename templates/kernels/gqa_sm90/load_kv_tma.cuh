// Loads of K and V tiles by TMA, in boxes of a page.

#pragma once

#include "common/barriers.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/sync.cuh"
#include "scale_rows.cuh"
#include "shared_memory.cuh"
#include "sparse_boxes.cuh"
#include "unaligned_rows.cuh"
#include "work_item.cuh"

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
      const PagedRows rows = scale_rows(params, kv);
      boxes[kv] =
          reinterpret_cast<u64>(rows.row_of(page, slot) + kv_head * scale_head_stride(params, kv));
    }
  }

  // Of K or V of the KV block whose first box is that of lane `first_lane`; arrives at `full` when
  // the copies are complete.
  template <typename ScaleParams>
  __device__ void load(const ScaleParams& params, int kv, int first_lane, unsigned char* target,
                       u32 full) const {
    const PagedRows rows = scale_rows(params, kv);
    const i64 to_head = scale_head_stride(params, kv);
    const int row = lane_index() % kBoxRows;
    const u64 own = row / kKvHeadsPerCta * rows.token_stride + row % kKvHeadsPerCta * to_head;
    target += lane_index() % kKvHeadsPerCta * kScaleHeadBytes +
              lane_index() / kKvHeadsPerCta * kScaleRowBytes;
    if (!has_aligned_scales(rows, to_head)) {
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

// Loads the two boxes of unaligned rows, of even tokens and of odd ones.
template <typename RowParams>
__device__ inline void load_unaligned(const RowParams& params, int kv, int kv_head, int slot,
                                      int page, u32 target, u32 box_bytes, u32 full,
                                      u64 cache_hint) {
#pragma unroll
  for (int parity = 0; parity < 2; ++parity) {
    const RowPlace place(params, kv, kv_head, parity);
    cp_async_bulk_tensor(target + parity * (box_bytes / 2),
                         kv == 0 ? &params.key_map : &params.value_map, full, cache_hint,
                         place.word_of_box(), slot / 2, place.head, page);
  }
}

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
        if constexpr (kHasUnalignedRows) {
          load_unaligned(params, kv, work.kv_head, slot, page, target, box_bytes, full, cache_hint);
        } else {
          cp_async_bulk_tensor(target, kv == 0 ? &params.key_map : &params.value_map, full,
                               cache_hint, 0, slot, 0, work.kv_head, page);
        }
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

using KvSource = KvTmaBoxes;
