// Mask of the invalid top-k indices of a KV block (FlashMLA's `is_kv_valid`, inverted).

#pragma once

#include "common/types.cuh"
#include "config.cuh"

struct alignas(8) InvalidMask {
  u16 bits[kProducerWarps];  // 16 tokens each

  __device__ u64 all() const { return *reinterpret_cast<const u64*>(bits); }
};
static_assert(kProducerWarps * 16 == kBlockN, "each producer warp loads 16 tokens");
