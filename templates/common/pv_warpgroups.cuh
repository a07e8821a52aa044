// Warp ranks within the two PV warpgroups, for any division of output dims among warps.

#pragma once

#include "dim_tiles.cuh"

// Output dim of component `c` of float4 `i`.
__device__ inline int element_dim(int warp, int i, int c) { return dim_of(warp, i) + c / 2; }

// Rank of a warp within its half, which takes two warps of each warpgroup, and its inverse.
__device__ inline int rank_in_half(int warp) { return warp / 4 * 2 + warp % 2; }
__device__ inline int warp_at(int half, int rank) { return rank / 2 * 4 + half * 2 + rank % 2; }
