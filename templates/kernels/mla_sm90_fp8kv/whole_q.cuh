// Q in FP8: the QK GEMM takes it as loaded.

#pragma once

#include "common/barriers.cuh"
#include "pipeline/work_pipeline.cuh"
#include "shared_memory.cuh"

// Waits for the copies of Q and arrives at `full`. Called by the threads that issued them.
template <int>
__device__ inline void finish_q_load(SharedMemoryPlan&, const Barrier& full, int, int) {
  finish_q_load(full);
}
