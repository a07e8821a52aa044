// Work pipeline: publishes work items and Q to the producer and consumer warps through mbarriers;
// the work loop of a consumer warpgroup.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/mov.cuh"
#include "ptx/sync.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// Called by one thread, with the number of warps that publish a work item and that read it, and of
// arrivals that complete Q.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem, int producers,
                                          int consumers, int query_writers) {
  init_barrier(smem.first_query_full, kPvWarps);
  init_barrier(smem.query_full, query_writers);
  init_barrier(smem.query_empty, kQueryReaders);
  for (int stage = 0; stage < 2; ++stage) {
    init_barrier(smem.work_full[stage], producers);
    init_barrier(smem.work_empty[stage], consumers);
  }
}

__device__ inline void finish_q_load(const Barrier& full) {
  cp_async_wait_group<0>();
  fence_proxy_async();
  __syncwarp();
  if (reload_lane() == 0) arrive(full);
}

// Keeps the scheduler's state in shared memory, because scheduler warps have few registers.
__device__ inline void save_scheduler_state(const TileScheduler& scheduler,
                                            SharedMemoryPlan& smem) {
  __syncwarp();
  if (reload_lane() == 0) smem.scheduler_storage.current_state = scheduler;
  __syncwarp();
}

static_assert(!kBatchInvariant || sizeof(SchedulerState) <= sizeof(SchedulerStorage::warp_seqs),
              "the state of the next phase takes their place");

// Writes work item `work_idx` to its slot, in batch-invariant kernels: a work item without rows
// ends a phase. The next one is not published before its combine, which takes the shared memory of
// Q and KV.
__device__ inline void produce_split(const Params& params, int rank_in_group, u32 work_idx,
                                     SharedMemoryPlan& smem) {
  SchedulerStorage& storage = smem.scheduler_storage;
  bool is_in_phase = has_phases(storage);
  // Another warp may not have written the first work item yet.
  const WorkSplits& before =
      work_idx == 1 ? storage.first_splits : smem.work_items[work_slot(work_idx - 1)];
  const bool begins_phase = work_idx > 0 && ends_phase(before);
  if (begins_phase) {
    named_barrier_sync(NamedBarrier::PhaseCombined, kPvThreads + kWarpLanes);
    is_in_phase = begin_phase(params, work_idx == 1, storage);
  }
  TileScheduler scheduler(params, storage.range, rank_in_group, storage.current_state);
  WorkCoord coord = storage.first_work;
  if (work_idx > 0) {
    coord = begins_phase && !is_in_phase ? kInvalidWork : scheduler.next_work(begins_phase);
  }
  WorkItem& work = smem.work_items[work_slot(work_idx)];
  const bool is_split = coord.seq_idx >= 0 && coord.rows > 0;
  if (!is_split && is_in_phase) coord = kNoRows;
  if (coord.seq_idx >= 0) {
    scheduler.fill_tokens(work, coord, work_idx);
    if (reload_lane() == 0) {
      if (is_split) {
        scheduler.fill_splits(work);
      } else {
        static_cast<WorkSplits&>(work) = {};
      }
    }
    save_scheduler_state(scheduler, smem);
  } else if (reload_lane() == 0) {
    work.seq_idx = -1;
  }
  __syncwarp();
}

// Writes work item `work_idx` to its slot. The saved state is already at the first work item, so
// that one does not advance; with `kTakesFirst` it is that of the schedule of the CTA: the first P
// waits for it.
template <bool kTakesFirst = false>
__device__ inline void produce_work(const Params& params, int rank_in_group, u32 work_idx,
                                    SharedMemoryPlan& smem) {
  if constexpr (kBatchInvariant) return produce_split(params, rank_in_group, work_idx, smem);
  const SchedulerStorage& storage = smem.scheduler_storage;
  TileScheduler scheduler(params, storage.range, rank_in_group, storage.current_state);
  WorkCoord coord = storage.first_work;
  if (!kTakesFirst || __any_sync(~0u, work_idx > 0)) {
    coord = scheduler.next_work(!kTakesFirst && work_idx == 0);
  }
  WorkItem& work = smem.work_items[work_slot(work_idx)];
  if (coord.seq_idx >= 0) {
    scheduler.fill_tokens(work, coord, work_idx);
    if (reload_lane() == 0) {
      if (kTakesFirst && work_idx == 0) {
        static_cast<WorkSplits&>(work) = storage.first_splits;
      } else {
        scheduler.fill_splits(work);
      }
    }
    save_scheduler_state(scheduler, smem);
  } else if (reload_lane() == 0) {
    work.seq_idx = -1;
  }
  __syncwarp();
}

// Called by the producer warp: releases work item `work_idx` and waits for the next one.
__device__ inline WorkCoord next_work_coord(SharedMemoryPlan& smem, u32& work_idx) {
  __syncwarp();  // all lanes have read the work item
  if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx)]);
  ++work_idx;
  wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
  return smem.work_items[work_slot(work_idx)];
}

// Waits for Q of work item `work_idx`.
__device__ inline void wait_query(const SharedMemoryPlan& smem, u32 work_idx) {
  if (work_idx == 0) {
    wait(smem.first_query_full, 0);
  } else {
    wait(smem.query_full, query_phase(work_idx) ^ 1);
  }
}

// Work loop of a consumer warpgroup: processes the work items of the CTA in order.
// `process` takes a work item and its index. `kReloadsIndex` makes the index opaque: otherwise
// compilers may hold the address of the work item during the mainloop. Begins with work item
// `work_idx`, and may return after one that ends a phase; returns the index of the next one, 0
// after the last.
template <bool kReloadsIndex = false, bool kReturnsAfterPhase = false, typename Process>
__device__ inline u32 work_loop(SharedMemoryPlan& smem, Process process, u32 work_idx = 0) {
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem* work = &smem.work_items[work_slot(work_idx)];
    if (work->seq_idx < 0) return 0;
    if constexpr (kReloadsIndex) {
      mov_b32(work_idx);
      work = &smem.work_items[work_slot(work_idx)];
    }
    process(*work, work_idx);
    work_idx = work->work_idx + 1;  // reloaded, so that the mainloop holds no register for it
    bool returns = false;
    if constexpr (kReturnsAfterPhase) returns = ends_phase(*work);
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
    if (kReturnsAfterPhase && __any_sync(~0u, returns)) return work_idx;
  }
}
