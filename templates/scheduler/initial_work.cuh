// Initial work of a CTA: from cached scheduler metadata, or computed and then cached.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/prefetch_block_table.cuh"
#include "scheduler/sched_meta_cache.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// Called by all threads. Advances `scheduler` to the CTA's first work item and returns that item.
__device__ inline WorkCoord find_initial_work(const Params& params, int cta_group, int seq_len,
                                              SchedulerStorage& scheduler_storage,
                                              TileScheduler& scheduler) {
  const bool is_cached = __any_sync(~0u, load_cached_schedule(params, seq_len, scheduler_storage));
  bool has_range = is_cached && scheduler_storage.first_work.seq_idx >= 0;
  if (!is_cached) has_range = find_range(params, cta_group, seq_len, scheduler_storage);
  has_range = __any_sync(~0u, has_range);
  if (has_range && warp_index() == kConsumerWarps - 1)
    prefetch_block_table(params, scheduler_storage);
  static_cast<SchedulerState&>(scheduler) = scheduler_storage.initial_state;
  WorkCoord first_work = scheduler_storage.first_work;
  if (!is_cached) {
    first_work = has_range ? scheduler.initial_work() : kInvalidWork;
    store_cached_schedule(params, {scheduler_storage.range, scheduler, first_work});
  }
  return first_work;
}
