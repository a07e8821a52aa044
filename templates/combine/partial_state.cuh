// What is left of a row of a piece, in one chunk.

#pragma once

#include "accumulators.cuh"
#include "common/types.cuh"

struct alignas(kChunkBytes) PartialState {
  float row_max;  // log2 units
  float row_sum;
  float scales[kNumScales];  // what halves are multiplied by; later also by the piece's weight
};
static_assert(sizeof(PartialState) == kChunkBytes,
              "the plan counts on it, and a copy brings a row");
