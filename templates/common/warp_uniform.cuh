// Warp-uniform value: equal in all lanes, and known to the compiler to be so. Values derived from
// it live in uniform registers, where wgmma takes its descriptors from.

#pragma once

#include "common/types.cuh"

__device__ inline u32 warp_uniform(u32 value) { return __reduce_max_sync(~0u, value); }
