// Blocks of tokens in the stages of a ring, counted from the first of all items.

#pragma once

#include "common/types.cuh"
#include "shared_memory.cuh"

// The block that `blocks` have preceded: where it is, and which phase of a barrier is its own.
__device__ inline int block_stage(u32 blocks) { return static_cast<int>(blocks % kStages); }
__device__ inline u32 block_parity(u32 blocks) { return blocks / kStages % 2; }
