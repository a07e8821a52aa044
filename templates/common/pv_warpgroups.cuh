// What is alike for two consumers of four warps each, however dims are divided among warps.

#pragma once

#include "dim_tiles.cuh"

// The dim of part `c` of float4 `i`.
__device__ inline int element_dim(int warp, int i, int c) { return dim_of(warp, i) + c / 2; }

// Where a warp is among those of its half, which are two of either consumer, and the warp that is
// there.
__device__ inline int rank_in_half(int warp) { return warp / 4 * 2 + warp % 2; }
__device__ inline int warp_at(int half, int rank) { return rank / 2 * 4 + half * 2 + rank % 2; }
