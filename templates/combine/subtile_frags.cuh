// Fragments of a sub-tile, the part of a work tile of several splits that one CTA reduces.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// Sub-tiles balance the reducers: whole groups of four fragments, which one warp sums together
// because they share their rows, or with many reducers a part of one group.
constexpr int kFragsPerStep = 4;

// Unsigned, because that division is shorter.
__device__ constexpr int frags_per_subtile(u32 num_reducers) {
  const int frags = static_cast<int>((kNumFrags + num_reducers - 1) / num_reducers);
  return frags < 3 ? frags : ceil_div(frags, kFragsPerStep) * kFragsPerStep;
}
