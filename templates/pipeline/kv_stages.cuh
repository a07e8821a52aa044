// Blocks of tokens in the stages of a ring, counted from the first of all items.

#pragma once

#include "common/types.cuh"
#include "shared_memory.cuh"

// The block that `i` have preceded: where it is, and which phase of a barrier is its own.
__device__ inline int stage_of(u32 i) { return static_cast<int>(i % kStages); }
__device__ inline u32 phase_of(u32 i) { return i / kStages % 2; }
