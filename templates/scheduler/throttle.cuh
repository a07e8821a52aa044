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
constexpr u32 kMostAhead = 3;
// How many blocks of tokens are told of at once.
constexpr u32 kToldTogether = 2;

// Where the first block of the grid would leave the piece that its span ends with, see
// combine/partial_out.cuh: it has the last span, behind which no piece goes on.
constexpr int kCounterOffset = kRows * kHeadDimVo * sizeof(u16);

// Counted is what all have asked for, in a word of the workspace that nobody else needs. It may be
// anything before, and is read before any are told of. Whoever is late, and reads it later, is
// slowed down by no more looks than it asks for blocks.
struct Pace {
  u32* counter;
  u32 sharers;  // none where spans are of different work, or neighbours share tokens
  u32 before = 0;
  u32 all = 0;
  u32 own = 0;
  u32 told = 0;
  u32 looks = 0;

  __device__ Pace(const Params& params, const Span& span)
      : counter(reinterpret_cast<u32*>(params.partial_out + kCounterOffset)),
        sharers(span.unit_cost == 0 && params.cta_group_size == 1 ? span.spans : 0) {}

  // Before a block is asked for. The first ones fill the ring, whoever is ahead.
  __device__ void wait() {
    if (sharers == 0) return;
#pragma unroll 1
    while (told > 0 && looks < own && is_ahead()) {
      all = ld_relaxed_gpu(counter);
      ++looks;
    }
  }

  // When a block has been asked for.
  __device__ void tell() {
    if (sharers == 0) return;
    if (++own == 1) before = ld_relaxed_gpu(counter);
    if (own <= kStages || own % kToldTogether != 0) return;
    if (lane_index() == 0) red_add_relaxed_gpu(counter, own - told);
    __syncwarp();
    told = own;
    all = ld_relaxed_gpu(counter);
  }

  __device__ bool is_ahead() const {
    return static_cast<int>(own * sharers - (all - before)) * 2 >
           static_cast<int>(kMostAhead * sharers);
  }
};
