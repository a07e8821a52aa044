// A query in eight bits is multiplied as it has been copied.

#pragma once

#include "common/barriers.cuh"
#include "pipeline/work_pipeline.cuh"
#include "shared_memory.cuh"

// By the threads that have copied it; tells `full`.
template <int>
__device__ inline void finish_q_load(SharedMemoryPlan&, const Barrier& full, int, int) {
  finish_q_load(full);
}
