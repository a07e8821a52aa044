// Partial softmax state (m, l) of a row of a split, in one 16-byte chunk.

#pragma once

#include "accumulators.cuh"
#include "common/types.cuh"
#include "config.cuh"

struct alignas(kChunkBytes) PartialState {
  float row_max;  // base 2
  float row_sum;
  float scales[kNumScales];  // inverse fp16 scales; the combine multiplies in the split's weight
};
static_assert(sizeof(PartialState) == kChunkBytes, "one cp.async copies the state of a row");
static_assert(sizeof(PartialState) == kPartialStateBytes, "the host plans with it");
