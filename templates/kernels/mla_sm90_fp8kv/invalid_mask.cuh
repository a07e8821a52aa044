// Tokens of a block that no row sees, for its list names nothing there.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

struct alignas(8) InvalidMask {
  u16 bits[kLoadWarps];  // of sixteen tokens each

  __device__ u64 all() const { return *reinterpret_cast<const u64*>(bits); }
};
static_assert(kLoadWarps * 16 == kBlockN, "each warp that loads brings sixteen tokens");
