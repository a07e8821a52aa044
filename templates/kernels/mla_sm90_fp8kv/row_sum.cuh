// Row sum l, computed by the PV warpgroups, which are less loaded than the QK warpgroup: every
// thread sums some tokens of one row of P.

#pragma once

#include "combine/partial.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/cvt.cuh"
#include "shared_memory.cuh"

constexpr int kThreadsPerRow = kConsumerThreads / kBlockM;
constexpr int kBytesPerThread = kTileRowBytes / kThreadsPerRow;  // of a row of P
static_assert(kThreadsPerRow * kBlockM == kConsumerThreads, "threads share the rows");

struct RowSum {
  float row_sum = 0.0f;  // over this thread's tokens, times the shared scale as O is

  __device__ static int row() { return reload_tid() / kThreadsPerRow; }

  // Adds P of the KV block in `stage`.
  __device__ void add(const SharedMemoryPlan& smem, int stage) {
    const int first = reload_tid() % kThreadsPerRow * kBytesPerThread;
    float sum = 0.0f;
#pragma unroll
    for (int byte_offset = 0; byte_offset < kBytesPerThread; byte_offset += sizeof(uint2)) {
      const int byte = first + byte_offset;
      const u32 offset = swizzled_offset<kTileRowBytes>(row(), byte / kChunkBytes);
      const uint2 loaded =
          *reinterpret_cast<const uint2*>(smem.probabilities[stage] + offset + byte % kChunkBytes);
      sum += sum_of_pair(loaded.x) + sum_of_pair(loaded.y);
    }
    row_sum = fmaf(sum, smem.block_scale[stage], row_sum);
  }

  __device__ static float sum_of_pair(u32 pair) {
    return cvt_f32(Fp16{}, static_cast<u16>(pair)) + cvt_f32(Fp16{}, static_cast<u16>(pair >> 16));
  }

  __device__ void rescale(const SharedMemoryPlan& smem, int stage) {
    row_sum *= smem.rescale[stage][row()];
  }

  // Reduces over the threads of a row, and publishes row sum and fp16 scale.
  __device__ void publish(SharedMemoryPlan& smem, int stage) const {
    float sum = row_sum;
#pragma unroll
    for (int lanes = 1; lanes < kThreadsPerRow; lanes *= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (reload_tid() % kThreadsPerRow != 0) return;
    smem.row_sum[stage][row()] = sum;
    // |O| <= l * max |V|.
    const float amax = sum * inverse_of_pow2(smem.row_shared_scale[stage]) * kMaxV;
    smem.row_scale[stage][row()] = fp16_scale(amax);
  }
};
