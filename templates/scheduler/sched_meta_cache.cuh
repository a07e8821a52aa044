// Initial work of a CTA, and the scheduler metadata cache: each CTA's range and first work item,
// kept across launches. All layers of a decode step share `seq_lens`, so layers 2..N skip the
// prefix sum over the sequences.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/pools.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/load.cuh"
#include "ptx/sync.cuh"
#include "scheduler/find_range.cuh"
#include "scheduler/grid_barrier.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "seq_info.cuh"

// Padded to whole L2 cache lines, so that no two CTAs write the same line.
struct alignas(128) CachedSchedMeta {
  SchedMeta sched_meta;
};

// Follows the semaphores of a workspace. The last CTA of a launch to arrive writes the schedule
// id and the sequence lengths, after every CTA has compared them: either all CTAs of a launch hit
// or all miss.
struct SchedMetaCache {
  int schedule_id;  // of the launch that stored it; 0 is an empty cache
  u32 arrivals;  // CTAs of the current launch that missed and stored their metadata
  int seq_lens[kMaxCachedSeqs];
  CachedSchedMeta ctas[1];  // gridDim.x of them
};

static_assert(sizeof(CachedSchedMeta) == kSchedMetaBytes, "the host allocates this size");
static_assert(sizeof(SchedMetaCache) == (2 + kMaxCachedSeqs) * sizeof(int) + kSchedMetaBytes,
              "the host allocates the header and the entries back to back");

__device__ inline SchedMetaCache& sched_meta_cache(const Params& params) {
  unsigned char* semaphores = reinterpret_cast<unsigned char*>(params.semaphores);
  return *reinterpret_cast<SchedMetaCache*>(semaphores + kSemaphoreBytes);
}

// Called by all threads. Loads this CTA's metadata into `scheduler_storage` and returns whether it
// is valid: stored under the same schedule id and for the same sequence lengths. `seq_len` is
// seq_len_of(first_seq_of_thread); where metadata is cached, a thread has no other sequence.
__device__ inline bool load_cached_schedule(const Params& params, int seq_len,
                                            SchedulerStorage& scheduler_storage) {
  if (params.schedule_id == 0) return false;
  const SchedMetaCache& cache = sched_meta_cache(params);
  bool is_stale = ld_relaxed_gpu(&cache.seq_lens[first_seq_of_thread(params)]) != seq_len;
  if (threadIdx.x == 0) is_stale |= ld_relaxed_gpu(&cache.schedule_id) != params.schedule_id;
  const u32 chunk = threadIdx.x;
  if (chunk < sizeof(SchedMeta) / kChunkBytes) {
    reinterpret_cast<float4*>(&scheduler_storage)[chunk] =
        ld_global_cg_v4_f32(reinterpret_cast<const float4*>(&cache.ctas[blockIdx.x]) + chunk);
  }
  return barrier_red_or(0, kThreads, is_stale) == 0;
}

// Called by all threads. Stores this CTA's metadata; the last CTA to arrive publishes the schedule
// id and the sequence lengths. Branches are warp-uniform by any-sync: otherwise the compiler moves
// operands of the MMAs out of uniform registers.
__device__ inline void store_cached_schedule(const Params& params, const SchedMeta& sched_meta) {
  const bool stores = params.schedule_id != 0 && warp_index() == kThreads / kWarpLanes - 1;
  if (!__any_sync(~0u, stores)) return;
  SchedMetaCache& cache = sched_meta_cache(params);
  const u32 last = gridDim.x - 1;
  u32 arrival = 0;
  if (lane_index() == 0) {
    cache.ctas[blockIdx.x].sched_meta = sched_meta;
    arrival = atom_inc_acq_rel_gpu(&cache.arrivals, last);
  }
  if (!__any_sync(~0u, lane_index() == 0 && arrival == last)) return;
#pragma unroll 1
  for (int first = 0; __any_sync(~0u, first < params.num_seqs); first += kWarpLanes) {
    const int seq_idx = first + lane_index();
    if (seq_idx < params.num_seqs) cache.seq_lens[seq_idx] = seq_len_of(params, seq_idx);
  }
  if (lane_index() == 0) cache.schedule_id = params.schedule_id;
}

constexpr int kIdsPerCacheLine = 128 / sizeof(int);
constexpr int kSinksPerCacheLine = 128 / sizeof(float);
constexpr int kTokensPerId = kIsSparse ? 1 : kPageSize;
constexpr int kPrefetchLines = 4;  // the top-k indices of two KV blocks

// Called by one warp, if the CTA has a range. Prefetches into L2 up to 1024 top-k indices of the
// first work item, whose lists are short, and the sinks, for which the epilogue waits.
template <typename PoolParams>
__device__ inline void prefetch_pools(const PoolParams& params, const WorkCoord& coord) {
  const int sink = lane_index() * kSinksPerCacheLine;
  if (params.sinks != nullptr && sink < params.heads) prefetch_l2(params.sinks + sink);
  const PooledIndices indices = pooled_indices(params, coord.seq_idx);
  const int end = (coord.first_kv_block + coord.num_kv_blocks) * kBlockN;
  const int token = coord.first_kv_block * kBlockN + lane_index() * kIdsPerCacheLine;
  if (token < min(end, coord.kv_end)) prefetch_l2_evict_last(indices.address_of(token));
}

// Called by one warp, if the CTA has a range. Prefetches the first block-table entries, or top-k
// indices, of the range into L2: the first KV load of the producer depends on them.
__device__ inline void prefetch_block_table(const Params& params,
                                            const SchedulerStorage& scheduler_storage) {
  const int cache_line = lane_index();
  if (cache_line >= kPrefetchLines) return;
  const BlockTableRow row = block_table_row(params, scheduler_storage.initial_state.seq_idx);
  int kv_block = scheduler_storage.range.begin - scheduler_storage.initial_state.tile_begin -
                 scheduler_storage.range.fixed_overhead_blocks;
  if constexpr (kBatchInvariant) kv_block = scheduler_storage.first_work.first_kv_block;
  // The range may begin in a later sequence: never prefetches past the end of the row.
  const u32 token = static_cast<u32>(max(kv_block, 0)) * kBlockN;
  const u32 index = token / kTokensPerId + cache_line * kIdsPerCacheLine;
  if (index < static_cast<u32>(row.num_pages))
    prefetch_l2_evict_last(params.block_tables + row.start + index);
}

// Called by all threads.
__device__ __noinline__ inline void compute_schedule(const Params& params, int cta_group,
                                                     int seq_len,
                                                     SchedulerStorage& scheduler_storage) {
  const int rank_in_group = static_cast<int>(blockIdx.x) - cta_group * params.cta_group_size;
  const bool has_range = __any_sync(~0u, find_range(params, cta_group, seq_len, scheduler_storage));
  TileScheduler scheduler(params, scheduler_storage.range, rank_in_group,
                          scheduler_storage.initial_state);
  WorkCoord first_work = has_range ? scheduler.initial_work() : kInvalidWork;
  WorkSplits first_splits = {};
  if (first_work.seq_idx >= 0) scheduler.fill_splits(first_splits);
  if constexpr (kBatchInvariant) {
    if (has_range && is_before_phases(scheduler_storage.range)) first_work = kNoRows;
  }
  store_cached_schedule(params, {scheduler_storage.range, scheduler, first_work, first_splits});
  __syncthreads();
  if (threadIdx.x == 0) {
    scheduler_storage.initial_state = scheduler;
    scheduler_storage.first_work = first_work;
    scheduler_storage.first_splits = first_splits;
  }
  __syncthreads();
}

// Called by all threads, after the barriers are initialized. Waits for the preceding kernel
// (PDL). Advances `scheduler` to the CTA's first work item and returns that item.
__device__ inline WorkCoord find_initial_work(const Params& params,
                                              SchedulerStorage& scheduler_storage,
                                              TileScheduler& scheduler) {
  pdl_wait();
  const int seq_len = seq_len_of(params, first_seq_of_thread(params));
  pdl_launch_dependents();
  const int cta = static_cast<int>(blockIdx.x);
  const int cta_group = div_by_group_size(params, cta);
  scheduler.rank_in_group = cta - cta_group * params.cta_group_size;
  const bool is_cached = __any_sync(~0u, load_cached_schedule(params, seq_len, scheduler_storage));
  if (!is_cached) compute_schedule(params, cta_group, seq_len, scheduler_storage);
  const WorkCoord first_work = scheduler_storage.first_work;
  const bool has_range = __any_sync(~0u, first_work.seq_idx >= 0);
  if (has_range && warp_index() == (kHasTwoPools ? kThreads / kWarpLanes : kPvWarps) - 1) {
    if constexpr (kHasTwoPools) {
      prefetch_pools(params, first_work);
    } else {
      prefetch_block_table(params, scheduler_storage);
    }
  }
  if constexpr (kBatchInvariant) {
    if (!has_range && threadIdx.x == 0) pass_grid_barrier(params);
  }
  static_cast<SchedulerState&>(scheduler) = scheduler_storage.initial_state;
  return first_work;
}

// Lengths of the sequences from `first` on. A template: not all kernels have all of them.
template <typename KernelParams>
__device__ inline void prefetch_seq_lens(const KernelParams& params, int first) {
  if (first >= params.num_seqs) return;
  if constexpr (kHasTwoPools) {
    prefetch_l2_evict_last(params.topk_length + first);
    if (params.extra_topk_length != nullptr) {
      prefetch_l2_evict_last(params.extra_topk_length + first);
    }
  } else if constexpr (!kIsSparse) {
    prefetch_l2_evict_last(params.seq_lens + first);
  } else if (params.topk_length != nullptr) {
    prefetch_l2_evict_last(params.topk_length + first);
  }
}

// Called by whole warps that have no work left: load_cached_schedule is the first access of the
// next launch. The weights of a layer lie between, so L2 evicts these lines last.
__device__ inline void prefetch_sched_meta(const Params& params) {
  constexpr int kWordsPerCacheLine = 128 / sizeof(int);
  if (params.schedule_id == 0) return;
  const SchedMetaCache& cache = sched_meta_cache(params);
  const int lane = lane_index();
  prefetch_seq_lens(params, lane * kWordsPerCacheLine);
  constexpr bool kHasTwoLines = kSchedMetaBytes > 128;
  const int meta_line = kHasTwoLines ? kWarpLanes - 1 - lane : 0;
  const bool is_cta_meta = lane == kWarpLanes - 1 || (kHasTwoLines && meta_line == 1);
  if (!is_cta_meta && lane * kWordsPerCacheLine >= params.num_seqs + 2) return;
  const int* cta_meta = reinterpret_cast<const int*>(&cache.ctas[blockIdx.x]);
  prefetch_l2_evict_last(is_cta_meta ? cta_meta + meta_line * kWordsPerCacheLine
                                     : &cache.schedule_id + lane * kWordsPerCacheLine);
}
static_assert((2 + kMaxCachedSeqs) / (128 / sizeof(int)) < kWarpLanes, "a lane per cache line");
