// How many tasks of a result each block adds up that merges pieces.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// A slice is as many tasks as make all mergers equally busy: whole groups of four, which a warp
// adds up together, for they are of the same rows; or, where there are many mergers, a part of one.
constexpr int kFragsPerStep = 4;

// By unsigned numbers, whose division is shorter.
__device__ constexpr int frags_per_subtile(u32 num_reducers) {
  const int frags = static_cast<int>((kNumFrags + num_reducers - 1) / num_reducers);
  return frags < 3 ? frags : ceil_div(frags, kFragsPerStep) * kFragsPerStep;
}
