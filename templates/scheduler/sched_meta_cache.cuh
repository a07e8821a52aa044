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
struct alignas(kBeginningBytes) KeptBeginning {
  Beginning beginning;
};

// Behind the counters of a workspace. Its plan and lengths change when all blocks of a launch have
// looked at them, so that all find what they begin with there, or none does.
struct KeptSpans {
  int plan;  // of the launch that has left it; none at first
  u32 misses;  // blocks of a launch that have not found their own
  int lengths[kKeptLengths];  // of requests
  KeptBeginning blocks[1];  // as many as there are
};

static_assert(sizeof(KeptBeginning) == kBeginningBytes, "the host allocates it");
static_assert(sizeof(KeptSpans) == (2 + kKeptLengths) * sizeof(int) + kBeginningBytes, "in turn");

__device__ inline KeptSpans& kept_spans(const Params& params) {
  unsigned char* counters = reinterpret_cast<unsigned char*>(params.semaphores);
  return *reinterpret_cast<KeptSpans*>(counters + kCountersBytes);
}

// By all threads of the block: brings what it begins with, if the same plan has left it and all
// lengths are what they were; says whether that is so. `length` is what length_of has for the
// thread's own_request, of which it has no other.
__device__ inline bool recall_beginning(const Params& params, int length, SpanScratch& scratch) {
  if (params.schedule_id == 0) return false;
  const KeptSpans& kept = kept_spans(params);
  bool is_other = ld_relaxed_gpu(&kept.lengths[own_request(params)]) != length;
  if (threadIdx.x == 0) is_other |= ld_relaxed_gpu(&kept.plan) != params.schedule_id;
  const u32 chunk = threadIdx.x;
  if (chunk < sizeof(Beginning) / kChunkBytes) {
    reinterpret_cast<float4*>(&scratch)[chunk] =
        ld_global_cg_v4_f32(reinterpret_cast<const float4*>(&kept.blocks[blockIdx.x]) + chunk);
  }
  return barrier_red_or(0, kThreads, is_other) == 0;
}

// By all threads: leaves what this block begins with. The block that is the last to do so leaves
// whose all of it is. All lanes of a warp go the same way, by votes: else compilers keep what
// products want in registers of the whole warp elsewhere.
__device__ inline void keep_beginning(const Params& params, const Beginning& beginning) {
  const bool keeps = params.schedule_id != 0 && warp_index() == kThreads / kWarpLanes - 1;
  if (!__any_sync(~0u, keeps)) return;
  KeptSpans& kept = kept_spans(params);
  const u32 last = gridDim.x - 1;
  u32 before = 0;
  if (lane_index() == 0) {
    kept.blocks[blockIdx.x].beginning = beginning;
    before = atom_inc_acq_rel_gpu(&kept.misses, last);
  }
  if (!__any_sync(~0u, lane_index() == 0 && before == last)) return;
#pragma unroll 1
  for (int first = 0; __any_sync(~0u, first < params.num_seqs); first += kWarpLanes) {
    const int request = first + lane_index();
    if (request < params.num_seqs) kept.lengths[request] = length_of(params, request);
  }
  if (lane_index() == 0) kept.plan = params.schedule_id;
}

// By whole warps, once they have nothing else to do: the next launch looks there first of all.
__device__ inline void prefetch_kept(const Params& params) {
  constexpr int kLineWords = 128 / sizeof(int);
  if (params.schedule_id == 0) return;
  const KeptSpans& kept = kept_spans(params);
  const int lane = lane_index();
  const bool is_own = lane == kWarpLanes - 1;
  if (!is_own && lane * kLineWords >= params.num_seqs + 2) return;
  prefetch_l2(is_own ? reinterpret_cast<const int*>(&kept.blocks[blockIdx.x])
                     : &kept.plan + lane * kLineWords);
}
static_assert((2 + kKeptLengths) / (128 / sizeof(int)) < kWarpLanes, "a lane for each line");
