// KV pipeline: stage and phase of a KV block, counted over all work items of the CTA.

#pragma once

#include "common/types.cuh"
#include "shared_memory.cuh"

__device__ inline int stage_of(u32 i) { return static_cast<int>(i % kStages); }
__device__ inline u32 phase_of(u32 i) { return i / kStages % 2; }
