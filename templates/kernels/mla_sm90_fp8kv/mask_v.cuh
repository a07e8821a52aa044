// Values that some row of a tile must not see: 0 * NaN is NaN, so what is not finite must not
// meet the tensor cores, though its weight is 0.

#pragma once

#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "nonfinite_flag.cuh"
#include "ptx/barrier.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// A pair of stored elements with zeros for what is no number: of that all bits are set but the
// sign.
__device__ inline u32 number_bytes(u32 pair) {
  return ((pair & 0x7f) == 0x7f ? 0 : pair & 0xff) |
         ((pair & 0x7f00) == 0x7f00 ? 0 : pair & 0xff00);
}

// Puts zeros for what is not finite in the tokens from `first` to `end` of the block at `stage`, by
// the consumers; and for a scale that is not. Some row sees these tokens.
__device__ inline void clear_nonfinite(SharedMemoryPlan& smem, const WorkItem& work,
                                       unsigned char* stage, int first, int end) {
  constexpr int kTokenPairs = kLatentDim / 2;
#pragma unroll 1
  for (int i = reload_tid(); i < (end - first) * kTokenPairs; i += kConsumerThreads) {
    const int token = first + i / kTokenPairs;
    const int dim = i % kTokenPairs * 2;
    u16& scale = value_scale(stage, token, dim / kScaledDims);
    const u32 row = dim / kTileRowBytes * kTileBytes +
                    swizzled_offset<128>(token, dim % kTileRowBytes / kChunkBytes);
    u16& stored = *reinterpret_cast<u16*>(stage + row + dim % kChunkBytes);
    const bool is_scale_finite = (scale & 0x7c00) != 0x7c00;
    const u32 finite = number_bytes(stored);
    if (is_scale_finite && finite == stored) continue;
    stored = static_cast<u16>(finite);
    if (!is_scale_finite) scale = 0;
    nonfinite_flag(smem, work) = 1;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
}
