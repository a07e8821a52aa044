// The loader, one warp: streams the tiles of keys and values of every item through the ring.

#pragma once

#include "common/barriers.cuh"
#include "common/kv_cache_hint.cuh"
#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/prefetch.cuh"
#include "shared_memory.cuh"
#include "tile_scheduler.cuh"
#include "work_pipeline.cuh"

// A lane copies one box of every kBlocksPerWindow-th tile, of which it reads the page ids ahead.
constexpr int kBlocksPerWindow = kWarpLanes / kBoxesPerBlock;

struct KvBoxes {
  const int* page_ids;  // of the request's pages
  int begin;  // boxes that hold a token that some row sees
  int end;
  int box;  // this lane's, counted from the request's first token
  int page;  // its page id
  int next_page;  // that of its next box

  __device__ KvBoxes() = default;
  __device__ KvBoxes(const Params& params, const WorkItem& work)
      : page_ids(params.block_tables + work.seq_idx * static_cast<i64>(params.block_tables_stride)),
        begin(work.kv_begin / kBoxTokens),
        end(ceil_div(work.kv_end, kBoxTokens)),
        box(work.first_kv_block * kBoxesPerBlock + lane_index()) {
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

  // Bytes that come of a tile: boxes that nobody sees are not copied.
  __device__ u32 bytes_of(int kv_block) const {
    const int first = max(kv_block * kBoxesPerBlock, begin);
    return static_cast<u32>(min((kv_block + 1) * kBoxesPerBlock, end) - first) * kBoxBytes;
  }
};

__device__ inline void load_work(const Params& params, const WorkItem& work, KvBoxes& boxes,
                                 SharedMemoryPlan& smem, PipelineState<kStages>& pipe) {
  const int end = work.first_kv_block + work.num_kv_blocks;
  const int own_block = lane_index() / kBoxesPerBlock;
  const u32 target = lane_index() % kBoxesPerBlock * kBoxBytes;
  const u64 cache_hint = kv_cache_hint(params.row_tiles != 1);
#pragma unroll 1
  for (int kv_block = work.first_kv_block, in_window = 0; kv_block < end; ++kv_block) {
    const bool copies = own_block == in_window && boxes.is_inside(boxes.box);
    const int slot = boxes.box * kBoxTokens % kPageSize;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const u32 full = shared_address(&smem.kv_full[pipe.index]);
      wait(smem.kv_empty[pipe.index], pipe.phase ^ 1);
      if (lane_index() == 0) mbarrier_arrive_expect_tx(full, boxes.bytes_of(kv_block));
      __syncwarp();
      if (copies) {
        cp_async_bulk_tensor(shared_address(smem.kv[pipe.index]) + target,
                             kv == 0 ? &params.key_map : &params.value_map, full, cache_hint, 0,
                             slot, 0, work.kv_head, boxes.page);
      }
      __syncwarp();
      pipe.advance();
    }
    if (++in_window == kBlocksPerWindow) {
      in_window = 0;
      boxes.advance();
    }
  }
}

// The loader: copies the tokens of all items.
__device__ inline void load_kv(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& pipeline = smem.work_pipeline;
  WorkItem work;
  KvBoxes boxes;
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    work = pipeline.at(0, 0);
    pdl_wait();
    boxes = KvBoxes(params, work);
    __syncwarp();
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!smem.is_first_work_valid);
  pdl_launch_dependents();
  PipelineState<kStages> pipe;
#pragma unroll 1
  for (u32 work_idx = 0; !work.is_none();) {
    load_work(params, work, boxes, smem, pipe);
    pipeline.release(work_idx);
    pipeline.wait_full(++work_idx);
    work = pipeline.at(work_idx, 0);
    boxes = KvBoxes(params, work);
  }
}

// Brings the page ids of all requests into L2, by the consumers: a line for each thread, and for no
// more tables than that are lines.
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
