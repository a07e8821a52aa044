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
  int begin;  // boxes with a token that any row attends to
  int end;
  int box;  // of this lane, counted from the first token of the sequence
  int page;  // page id of `box`
  int next_page;  // page id of the lane's next box

  __device__ KvTmaBoxes() = default;
  __device__ KvTmaBoxes(const Params& params, const WorkItem& work)
      : page_ids(work.page_ids(params)),
        begin(work.kv_begin / kBoxTokens),
        end(ceil_div(work.kv_end, kBoxTokens)),
        box(work.first_kv_block * kBoxesPerKvBlock + lane_index()) {
    page = read(box);
    next_page = read(box + kWarpLanes);
  }

  __device__ bool is_inside(int index) const { return index >= begin && index < end; }

  __device__ int read(int index) const {
    return is_inside(index) ? page_ids[index * kBoxTokens / kPageSize] : 0;
  }

  __device__ void advance() {
    box += kWarpLanes;
    page = next_page;
    next_page = read(box + kWarpLanes);
  }

  // Transaction bytes of a KV block: fully masked boxes are not loaded.
  __device__ u32 bytes_of(int kv_block) const {
    const int first = max(kv_block * kBoxesPerKvBlock, begin);
    return static_cast<u32>(min((kv_block + 1) * kBoxesPerKvBlock, end) - first) * kBoxBytes;
  }
};

// Copies a row of block scales to shared memory, or zeroes it.
template <int kBytes>
__device__ inline void copy_scale_row(u32 target, const void* source, bool exists) {
  const u32 bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 4) cp_async_ca_4(target, source, bytes);
  if constexpr (kBytes == 8) cp_async_ca_8(target, source, bytes);
  if constexpr (kBytes == 16) cp_async_cg_16(target, source, bytes);
}

// Copies the block scales of a tile behind it, and arrives at `full` when they are complete. TMA
// would need strides of 16 bytes. `scales` are those of the first kv head; the lanes have the page
// ids of the KV block from lane `first_lane` on. Rows that are aligned to their size are copied
// asynchronously.
__device__ inline void load_scales(const Params& params, const PagedRows& scales, i64 head_stride,
                                   const KvTmaBoxes& boxes, int first_lane, int kv_block,
                                   unsigned char* target, u32 full) {
  const u64 alignment =
      reinterpret_cast<u64>(scales.rows) | scales.page_stride | scales.token_stride | head_stride;
  const bool is_aligned = alignment % kScaleRowBytes == 0;
#pragma unroll 4
  for (int first = 0; first < kBlockN * kKvHeadsPerCta; first += kWarpLanes) {
    const int token = (first + lane_index()) / kKvHeadsPerCta;
    const int head = (first + lane_index()) % kKvHeadsPerCta;
    const int box = token / kBoxTokens;
    const int page = __shfl_sync(~0u, boxes.page, first_lane + box);
    const bool exists =
        boxes.is_inside(kv_block * kBoxesPerKvBlock + box) && is_valid_page(page, params.num_pages);
    const int slot = (kv_block * kBlockN + token) % kPageSize;
    const unsigned char* source =
        exists ? scales.row_of(page, slot) + head * head_stride : scales.rows;
    unsigned char* row = target + head * kScaleHeadBytes + token * kScaleRowBytes;
    if (is_aligned) {
      copy_scale_row<kScaleRowBytes>(shared_address(row), source, exists);
    } else {
#pragma unroll 1
      for (int i = 0; i < kScaleRowBytes; ++i) row[i] = exists ? source[i] : 0;
    }
  }
  if (is_aligned) {
    cp_async_mbarrier_arrive_noinc(full);
  } else {
    mbarrier_arrive(full);
  }
}

// The same for K or V. A template: without block scales, Params lacks these parameters.
template <typename ScaleParams>
__device__ inline void load_scales_of(const ScaleParams& params, int kv, int kv_head,
                                      const KvTmaBoxes& boxes, int first_lane, int kv_block,
                                      unsigned char* target, u32 full) {
  const i64 head_stride = kv == 0 ? params.key_scale_head_stride : params.value_scale_head_stride;
  const PagedRows scales{
      (kv == 0 ? params.key_scales : params.value_scales) + kv_head * head_stride,
      kv == 0 ? params.key_scale_page_stride : params.value_scale_page_stride,
      kv == 0 ? params.key_scale_token_stride : params.value_scale_token_stride};
  load_scales(params, scales, head_stride, boxes, first_lane, kv_block, target, full);
}

__device__ inline void load_work(const Params& params, const WorkItem& work, KvTmaBoxes& boxes,
                                 SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const int end = work.first_kv_block + work.num_kv_blocks;
  const int lane_block = lane_index() / kBoxesPerKvBlock;
  const u32 box_offset = lane_index() % kBoxesPerKvBlock * kBoxBytes;
  const u64 cache_hint = kv_cache_hint(params.m_tiles);
#pragma unroll 1
  for (int kv_block = work.first_kv_block, in_window = 0; kv_block < end; ++kv_block) {
    const bool issues_copy = lane_block == in_window && boxes.is_inside(boxes.box);
    const int slot = boxes.box * kBoxTokens % kPageSize;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const u32 full = shared_address(&smem.kv_full[kv_pipe.index]);
      wait(smem.kv_empty[kv_pipe.index], kv_pipe.phase ^ 1);
      if (lane_index() == 0) mbarrier_arrive_expect_tx(full, boxes.bytes_of(kv_block));
      __syncwarp();
      if (issues_copy) {
        cp_async_bulk_tensor(shared_address(smem.kv[kv_pipe.index]) + box_offset,
                             kv == 0 ? &params.key_map : &params.value_map, full, cache_hint, 0,
                             slot, 0, work.kv_head, boxes.page);
      }
      if constexpr (kHasBlockScales) {
        load_scales_of(params, kv, work.kv_head, boxes, in_window * kBoxesPerKvBlock, kv_block,
                       smem.kv[kv_pipe.index] + kTileBytes, full);
      }
      __syncwarp();
      kv_pipe.advance();
    }
    if (++in_window == kKvBlocksPerWindow) {
      in_window = 0;
      boxes.advance();
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
  constexpr int kIdsPerCacheLine = 32;
  const u32 lines_per_seq = static_cast<u32>(ceil_div(params.max_pages, kIdsPerCacheLine));
  const u32 cache_line = blockIdx.x * kConsumerThreads + thread;
  if (lines_per_seq == 0) return;
  const u32 seq_idx = cache_line / lines_per_seq;
  if (seq_idx >= params.num_seqs) return;
  prefetch_l2(params.block_tables + seq_idx * static_cast<i64>(params.block_tables_stride) +
              (cache_line - seq_idx * lines_per_seq) * kIdsPerCacheLine);
}
