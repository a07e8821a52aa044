// NaN/Inf in masked V: replaces non-finite elements and scales by zero before the PV GEMM. The
// probability of a masked token is 0, but 0 * NaN is NaN.

#pragma once

#include "common/barriers.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "nonfinite_flag.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// A pair of stored elements with zero for NaN. An e4m3 NaN has every bit but the sign set.
__device__ inline u32 finite_bytes(u32 pair) {
  return ((pair & 0x7f) == 0x7f ? 0 : pair & 0xff) |
         ((pair & 0x7f00) == 0x7f00 ? 0 : pair & 0xff00);
}

// Called by all PV threads. Clears non-finite V elements and scales of the tokens from `first` to
// `end` of the KV block at `stage`. Some row attends to these tokens, so a NaN/Inf sets the flag
// and the epilogue restores it.
__device__ inline void clear_nonfinite(SharedMemoryPlan& smem, const WorkItem& work,
                                       unsigned char* stage, int first, int end) {
  constexpr int kTokenPairs = kLatentDim / 2;
#pragma unroll 1
  for (int i = reload_tid(); i < (end - first) * kTokenPairs; i += kConsumerThreads) {
    const int token = first + i / kTokenPairs;
    const int dim = i % kTokenPairs * 2;
    u16& scale = v_scale(stage, token, dim / kScaledDims);
    const u32 row = dim / kTileRowBytes * kTileBytes +
                    swizzled_offset<128>(token, dim % kTileRowBytes / kChunkBytes);
    u16& stored = *reinterpret_cast<u16*>(stage + row + dim % kChunkBytes);
    const bool is_scale_finite = (scale & 0x7c00) != 0x7c00;
    const u32 finite = finite_bytes(stored);
    if (is_scale_finite && finite == stored) continue;
    stored = static_cast<u16>(finite);
    if (!is_scale_finite) scale = 0;
    nonfinite_flag(smem, work) = 1;
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
}
