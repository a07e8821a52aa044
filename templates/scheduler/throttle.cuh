// CTA throttle: delays CTAs that run ahead. In the memory-bound regime SMs do not share HBM
// bandwidth evenly; fast CTAs finish early and their share of the bandwidth is lost.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/load.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// A CTA may be this far ahead of the mean of all CTAs, in halves of a KV block.
constexpr u32 kMaxHalfBlocksAhead = 3;
// A CTA adds its progress to the total once per so many KV blocks.
constexpr u32 kReportInterval = 2;

// The progress counter lies in the last partial-output slot of CTA 0, see combine/partial.cuh.
// That slot is unused: CTA 0 has the last range, so no split continues past its end. In
// batch-invariant kernels it lies in the last slot, which the throttled launch does not use.
constexpr int kSlotBytes = kBlockM * kHeadDimVo * sizeof(u16);
__device__ inline u32* progress_of(const Params& params) {
  const int slot = kBatchInvariant ? num_slots_of(params) - 1 : 1;
  return reinterpret_cast<u32*>(params.partial_out + static_cast<i64>(slot) * kSlotBytes);
}

// Counts the KV blocks that all CTAs have requested in an otherwise unused word of the workspace.
// The word is not initialized, so each CTA subtracts the value it reads before its first report. A
// CTA that starts late subtracts reports of others, too, and appears to be ahead; `num_polls`
// bounds what that costs to one poll per requested KV block.
struct CtaThrottle {
  u32* progress;
  // 0, no throttling, where ranges differ in work, or where CTAs of a group share KV through L2.
  u32 num_ctas;
  u32 initial_total = 0;
  u32 total_blocks = 0;
  u32 own_blocks = 0;
  u32 reported = 0;
  u32 num_polls = 0;

  __device__ CtaThrottle(const Params& params, const ScheduleRange& range)
      : progress(progress_of(params)),
        num_ctas(range.fixed_overhead_blocks == 0 && params.cta_group_size == 1 ? range.num_ranges
                                                                                : 0) {}

  // Called before a KV block is requested. Never delays the prologue that fills the pipeline.
  __device__ void wait() {
    if (num_ctas == 0) return;
#pragma unroll 1
    while (reported > 0 && num_polls < own_blocks && is_ahead()) {
      total_blocks = ld_relaxed_gpu(progress);
      ++num_polls;
    }
  }

  // Called after a KV block has been requested.
  __device__ void report() {
    if (num_ctas == 0) return;
    if (++own_blocks == 1) initial_total = ld_relaxed_gpu(progress);
    if (own_blocks <= kStages || own_blocks % kReportInterval != 0) return;
    if (lane_index() == 0) red_add_relaxed_gpu(progress, own_blocks - reported);
    __syncwarp();
    reported = own_blocks;
    total_blocks = ld_relaxed_gpu(progress);
  }

  __device__ bool is_ahead() const {
    return static_cast<int>(own_blocks * num_ctas - (total_blocks - initial_total)) * 2 >
           static_cast<int>(kMaxHalfBlocksAhead * num_ctas);
  }
};
