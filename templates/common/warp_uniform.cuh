// A number that all lanes have, and that compilers know to be the same in all: what depends on
// it is then in registers of the whole warp, where products want their descriptors.

#pragma once

#include "common/types.cuh"

__device__ inline u32 warp_uniform(u32 value) { return __reduce_max_sync(~0u, value); }
