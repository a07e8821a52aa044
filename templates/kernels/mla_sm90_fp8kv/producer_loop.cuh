// Producer loop: all producer warps load Q and KV of each work item; one of them is also the
// scheduler warp, which publishes work items.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load_kv.cuh"
#include "load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "prepare_q.cuh"
#include "ptx/mov.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// Called by one thread.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem) {
  init_work_barriers(smem, 1, kWorkReaders, kProducerWarps);
}

__device__ inline bool is_scheduler_warp() { return reload_warp() == kConsumerWarps; }

// Rank of this CTA in its CTA group, recomputed where it is used so that it holds no register.
__device__ inline int cta_rank_in_group(const Params& params) {
  u32 index = blockIdx.x;
  mov_b32(index);
  const int cta = static_cast<int>(index);
  return cta - div_by_group_size(params, cta) * params.cta_group_size;
}

// Publishes work item `work_idx` to all warps.
__device__ inline void publish_work(const Params& params, int rank_in_group, u32 work_idx,
                                    SharedMemoryPlan& smem) {
  wait(smem.work_empty[work_slot(work_idx)], work_phase(work_idx) ^ 1);
  produce_work(params, rank_in_group, work_idx, smem);
  if (reload_lane() == 0) arrive(smem.work_full[work_slot(work_idx)]);
}

// Loads Q of a work item. Consumers have loaded the first one.
__device__ inline void load_next_q(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem) {
  if (work.work_idx == 0) return;
  wait(smem.query_empty, query_phase(work.work_idx) ^ 1);
  const int thread = reload_tid() % kProducerThreads;
  load_q_async(params, work, smem, thread, kProducerThreads);
  finish_q_load<2>(smem, smem.query_full, thread, kProducerThreads);
}

// KV blocks of the next work item that are loaded while Q of the current one is still in use.
constexpr int kBlocksBeforeQ = kStages - 1;

// `num_published` counts the work items that the scheduler warp has published.
__device__ inline void load_kv_blocks(const Params& params, const WorkItem& work,
                                      SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                      u32& num_published) {
  KvBlockStream stream(params, work);
  const int num_before_q = min(work.num_kv_blocks, kBlocksBeforeQ);
#pragma unroll 1
  for (int num_loaded = 0;; ++num_loaded) {
    if (num_loaded == num_before_q) load_next_q(params, work, smem);
    // Publishes the first work item once its first KV block is in flight, and the next one once all
    // KV blocks of this one are: loads go first.
    const u32 num_due = work.work_idx + (num_loaded == work.num_kv_blocks ? 2 : min(num_loaded, 1));
#pragma unroll 1
    while (is_scheduler_warp() && num_published < num_due)
      publish_work(params, cta_rank_in_group(params), num_published++, smem);
    if (num_loaded == work.num_kv_blocks) return;
    // The CTA waits for its first KV block before it loads more: otherwise the first loads of the
    // last CTAs queue behind all loads of the others.
    if (work.work_idx == 0 && num_loaded == 1) wait(smem.kv_full[0], 0);
    stream.load_kv_block(smem, pipe, work.first_kv_block + num_loaded);
  }
}

// `scheduler` is at the first work item.
__device__ inline void producer_loop(const Params& params, const TileScheduler& scheduler,
                                     const WorkCoord& first_work, SharedMemoryPlan& smem) {
  // Coordinates and index of a work item are reloaded from shared memory, so that they hold no
  // registers. Every warp writes the same values here.
  if (reload_lane() == 0) {
    static_cast<WorkCoord&>(smem.work_items[0]) = first_work;
    smem.work_items[0].work_idx = 0;
  }
  __syncwarp();
  if (is_scheduler_warp()) save_scheduler_state(scheduler, smem);
  PipelineState<kStages> pipe;
  u32 work_idx = 0;
  u32 num_published = 0;
#pragma unroll 1
  while (true) {
    load_kv_blocks(params, smem.work_items[work_slot(work_idx)], smem, pipe, num_published);
    work_idx = smem.work_items[work_slot(work_idx)].work_idx;
    if (next_work_coord(smem, work_idx).seq_idx < 0) return;
  }
}
