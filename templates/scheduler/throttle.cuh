// Keeps blocks of the grid about as far as each other. Where memory is the limit, some SMs get
// more of it than others; those end early, and what they leave then the others cannot use.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/ld.cuh"
#include "ptx/red.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"

// How far ahead of the mean a block may ask for tokens, in halves of a block of tokens.
constexpr u32 kMaxBlocksAhead = 3;
// How many blocks of tokens are told of at once.
constexpr u32 kReportInterval = 2;

// Where the first block of the grid would leave the piece that its span ends with, see
// combine/partial_out.cuh: it has the last span, behind which no piece goes on.
constexpr int kProgressOffset = kBlockM * kHeadDimVo * sizeof(u16);

// Counted is what all have asked for, in a word of the workspace that nobody else needs. It may be
// anything before, and is read before any are told of. Whoever is late, and reads it later, is
// slowed down by no more looks than it asks for blocks.
struct CtaThrottle {
  u32* progress;
  u32 num_ctas;  // none where spans are of different work, or neighbours share tokens
  u32 initial_total = 0;
  u32 total_blocks = 0;
  u32 own_blocks = 0;
  u32 reported = 0;
  u32 num_polls = 0;

  __device__ CtaThrottle(const Params& params, const ScheduleRange& range)
      : progress(reinterpret_cast<u32*>(params.partial_out + kProgressOffset)),
        num_ctas(range.fixed_overhead_blocks == 0 && params.cta_group_size == 1 ? range.num_ranges
                                                                                : 0) {}

  // Before a block is asked for. The first ones fill the ring, whoever is ahead.
  __device__ void wait() {
    if (num_ctas == 0) return;
#pragma unroll 1
    while (reported > 0 && num_polls < own_blocks && is_ahead()) {
      total_blocks = ld_relaxed_gpu(progress);
      ++num_polls;
    }
  }

  // When a block has been asked for.
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
           static_cast<int>(kMaxBlocksAhead * num_ctas);
  }
};
