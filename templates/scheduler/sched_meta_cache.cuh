// Keeps what blocks begin with from launch to launch: the layers of a model have the same
// lengths.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/atom.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ld.cuh"
#include "ptx/prefetch.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"

// In whole lines of L2.
struct alignas(kSchedMetaBytes) CachedSchedMeta {
  SchedMeta sched_meta;
};

// Behind the counters of a workspace. Its plan and lengths change when all blocks of a launch have
// looked at them, so that all find what they begin with there, or none does.
struct SchedMetaCache {
  int schedule_id;  // of the launch that has left it; none at first
  u32 misses;  // blocks of a launch that have not found their own
  int seq_lens[kMaxCachedSeqs];  // of requests
  CachedSchedMeta ctas[1];  // as many as there are
};

static_assert(sizeof(CachedSchedMeta) == kSchedMetaBytes, "the host allocates it");
static_assert(sizeof(SchedMetaCache) == (2 + kMaxCachedSeqs) * sizeof(int) + kSchedMetaBytes,
              "in turn");

__device__ inline SchedMetaCache& sched_meta_cache(const Params& params) {
  unsigned char* semaphores = reinterpret_cast<unsigned char*>(params.semaphores);
  return *reinterpret_cast<SchedMetaCache*>(semaphores + kSemaphoreBytes);
}

// By all threads of the block: brings what it begins with, if the same plan has left it and all
// lengths are what they were; says whether that is so. `seq_len` is what seq_len_of has for the
// thread's first_seq_of_thread, of which it has no other.
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

// By all threads: leaves what this block begins with. The block that is the last to do so leaves
// whose all of it is. All lanes of a warp go the same way, by votes: else compilers keep what
// products want in registers of the whole warp elsewhere.
__device__ inline void store_cached_schedule(const Params& params, const SchedMeta& sched_meta) {
  const bool stores = params.schedule_id != 0 && warp_index() == kThreads / kWarpLanes - 1;
  if (!__any_sync(~0u, stores)) return;
  SchedMetaCache& cache = sched_meta_cache(params);
  const u32 last = gridDim.x - 1;
  u32 arrived = 0;
  if (lane_index() == 0) {
    cache.ctas[blockIdx.x].sched_meta = sched_meta;
    arrived = atom_inc_acq_rel_gpu(&cache.misses, last);
  }
  if (!__any_sync(~0u, lane_index() == 0 && arrived == last)) return;
#pragma unroll 1
  for (int first = 0; __any_sync(~0u, first < params.num_seqs); first += kWarpLanes) {
    const int seq_idx = first + lane_index();
    if (seq_idx < params.num_seqs) cache.seq_lens[seq_idx] = seq_len_of(params, seq_idx);
  }
  if (lane_index() == 0) cache.schedule_id = params.schedule_id;
}

// By whole warps, once they have nothing else to do: the next launch looks there first of all.
__device__ inline void prefetch_sched_meta(const Params& params) {
  constexpr int kWordsPerCacheLine = 128 / sizeof(int);
  if (params.schedule_id == 0) return;
  const SchedMetaCache& cache = sched_meta_cache(params);
  const int lane = lane_index();
  const bool is_cta_meta = lane == kWarpLanes - 1;
  if (!is_cta_meta && lane * kWordsPerCacheLine >= params.num_seqs + 2) return;
  prefetch_l2(is_cta_meta ? reinterpret_cast<const int*>(&cache.ctas[blockIdx.x])
                          : &cache.schedule_id + lane * kWordsPerCacheLine);
}
static_assert((2 + kMaxCachedSeqs) / (128 / sizeof(int)) < kWarpLanes, "a lane for each line");
