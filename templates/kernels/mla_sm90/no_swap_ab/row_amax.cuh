// Row abs-max (amax) of one half of the output dims.

#pragma once

#include "accumulators.cuh"
#include "combine/reduce_group.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "shared_memory.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/row_state.cuh"

// Four independent chains: each max depends on the one before it in its chain.
template <typename Filter>
__device__ inline float row_amax_of(const Accumulators& accumulators, int r, Filter filter) {
  constexpr int kChains = 4;
  float chains[kChains] = {};
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const float* acc = accumulators + i * 4 + r * 2;
    float& chain = chains[i % kChains];
    chain = fmaxf(chain, fmaxf(fabsf(filter(acc[0])), fabsf(filter(acc[1]))));
  }
  return quad_reduce_max(fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3])));
}

// amax of the finite elements of each row. The slow pass, which skips Inf, runs only if one occurs.
__device__ inline void row_amax(SharedMemoryPlan&, const ReduceGroup&,
                                const Accumulators& accumulators, float (&amax)[kRowsPerThread]) {
  float max_amax = 0.0f;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    amax[r] = row_amax_of(accumulators, r, [](float value) { return value; });
    max_amax = fmaxf(max_amax, amax[r]);
  }
  if (!__any_sync(~0u, max_amax == kInfinity)) return;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    amax[r] = row_amax_of(accumulators, r, nan_unless_finite);
  }
}

// Whether this thread writes the state of its rows, and the scale of its half of them.
__device__ inline bool is_row_writer(int) { return reload_tid() < 128 && reload_lane() % 4 == 0; }
__device__ inline bool is_scale_writer(int) { return reload_lane() % 4 == 0; }
