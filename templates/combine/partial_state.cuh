// What is left of a row of a piece, in one chunk.

#pragma once

#include "accumulators.cuh"
#include "common/types.cuh"

struct alignas(kChunkBytes) PartialRow {
  float reference;  // log2 units
  float sum;
  float scales[kScales];  // what halves are multiplied by; later also by the piece's weight
};
static_assert(sizeof(PartialRow) == kChunkBytes, "the plan counts on it, and a copy brings a row");
