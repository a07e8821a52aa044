// Combine of batch-invariant kernels: each CTA visits its work items again when every CTA has
// stored its splits, and reduces its part of their tiles.

#pragma once

#include "combine/partial.cuh"
#include "combine/reduce_group.cuh"
#include "combine/subtiles.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/sync.cuh"
#include "scheduler/grid_barrier.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "seq_info.cuh"
#include "shared_memory.cuh"

// Most splits of a sub-tile of which two are in shared memory at once; 0 with 64 rows, whose loads
// take bandwidth rather than latency, and which have no registers for a second one.
__device__ constexpr int max_paired_splits() {
  if (kBlockM > 32) return 0;
  int max_splits = kMaxRanges;
  while (!subtiles_fit(max_splits, kCombineSmemBytes / 2)) --max_splits;
  return max_splits;
}
constexpr int kMaxPairedSplits = max_paired_splits();
constexpr bool kPairsSubtiles = kMaxPairedSplits > 0;

// A sub-tile that this CTA reduces.
struct OwnSubtile : WorkCoord, WorkSplits {
  u32 smem_half;

  __device__ bool exists() const { return seq_idx >= 0; }
  __device__ bool is_empty() const {
    return num_splits == 1 || split_idx * subtile_frags >= kNumFrags;
  }
  __device__ WorkItem work() const {
    WorkItem work;
    static_cast<WorkCoord&>(work) = *this;
    static_cast<WorkSplits&>(work) = *this;
    return work;
  }
  __device__ CombineSmem combine_smem(SharedMemoryPlan& smem, const WorkItem& work) const {
    CombineSmem found = combine_smem_of_subtile(smem, work);
    found.bytes += smem_half * (kCombineSmemBytes / 2 / kChunkBytes * kChunkBytes);
    return found;
  }
};

// Called by the PV warps after the work items of the CTA, or of a phase, when no warp uses Q and
// KV. The sum of a row takes its splits in an order that the length of its sequence determines.
// The partials of a sub-tile are requested before the one before it is reduced, if both fit.
__device__ inline void combine_fixed_splits(const Params& params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  const ReduceGroup all = {-1};
  TileScheduler scheduler(params, smem.scheduler_storage.range, cta_rank_in_group(params),
                          smem.scheduler_storage.initial_state);
  const bool ends_phase = has_phases(smem.scheduler_storage);
  enum class Progress : u32 { Begins, Searches, HasWaited } progress = Progress::Begins;
  OwnSubtile loaded;
  OwnSubtile next;
  loaded.seq_idx = -1;
  bool finds_next = true;
#pragma unroll 1
  while (true) {
    if (finds_next || !kPairsSubtiles) {
      next = {};
#pragma unroll 1
      do {
        static_cast<WorkCoord&>(next) = scheduler.next_work(progress == Progress::Begins);
        if (progress == Progress::Begins) progress = Progress::Searches;
        if (next.exists()) scheduler.fill_splits(next);
      } while (next.exists() && next.is_empty());
      if ((next.exists() || ends_phase) && progress != Progress::HasWaited) {
        all.sync();  // all warps have stored their splits
        if (all.is_leader()) wait_for_grid(params, GridBarrier::SplitsStored);
        all.sync();
        progress = Progress::HasWaited;
      }
    }
    const bool fits = !kPairsSubtiles || !loaded.exists() ||
                      max(loaded.num_splits, next.num_splits) <= kMaxPairedSplits;
    finds_next = next.exists() && fits;
    if (finds_next) {
      next.smem_half = kPairsSubtiles && loaded.exists() ? loaded.smem_half ^ 1 : 0;
      const WorkItem work = next.work();
      load_subtile(params, work, PartialSlots(params, work), next.combine_smem(smem, work));
    }
    if (!kPairsSubtiles) loaded = next;
    if (loaded.exists()) {
      const WorkItem work = loaded.work();
      reduce_subtile(params, work, smem, loaded.combine_smem(smem, work),
                     kPairsSubtiles && finds_next);
      all.sync();  // other partials take the same shared memory
    } else if (!finds_next) {
      break;
    }
    if (kPairsSubtiles) loaded = next;
    if (!kPairsSubtiles || !finds_next) loaded.seq_idx = -1;
  }
  if (progress != Progress::HasWaited && all.is_leader()) pass_grid_barrier(params);
  if (!ends_phase) return;
  // The next phase writes other partials to the same slots, and loads Q and KV.
  fence_proxy_async();
  all.sync();
  if (all.is_leader()) wait_for_grid(params, GridBarrier::PhaseCombined);
  all.sync();
  named_barrier_arrive(NamedBarrier::PhaseCombined, kPvThreads + kWarpLanes);
}

// The same as a call, which leaves the PV loop more registers.
__device__ __noinline__ inline void call_combine_fixed_splits(const Params& params) {
  combine_fixed_splits(params);
}

// Work loop of the PV warps, which combine splits after the last work item, and after each phase;
// with kCallsCombine, the epilogue combines phases.
template <bool kReloadsIndex = false, typename Process>
__device__ inline void pv_work_loop(const Params& params, SharedMemoryPlan& smem, Process process) {
  if constexpr (!kBatchInvariant || kCallsCombine) {
    work_loop<kReloadsIndex>(smem, process);
    if (kBatchInvariant && !has_phases(smem.scheduler_storage)) call_combine_fixed_splits(params);
    return;
  }
  u32 work_idx = 0;
#pragma unroll 1
  while (true) {
    work_idx = work_loop<kReloadsIndex, true>(smem, process, work_idx);
    const bool is_last = __any_sync(~0u, work_idx == 0);
    if (is_last && has_phases(smem.scheduler_storage)) return;
    combine_fixed_splits(params);
    if (is_last) return;
  }
}
