// Sums of the probabilities of rows, by the consumers, who have time for it: every thread has
// some of a row's tokens.

#pragma once

#include "combine/fp16_scale.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/cvt.cuh"
#include "shared_memory.cuh"

constexpr int kSummersOfRow = kConsumerThreads / kRows;
constexpr int kSummedBytes = kTileRowBytes / kSummersOfRow;  // of a block's row
static_assert(kSummersOfRow * kRows == kConsumerThreads, "threads share the rows");

struct RowSum {
  float total = 0.0f;  // of this thread's tokens, in the units of the outputs

  __device__ static int row() { return fresh_thread() / kSummersOfRow; }

  // Adds those of the block in `stage`.
  __device__ void add(const SharedMemory& shared, int stage) {
    const int first = fresh_thread() % kSummersOfRow * kSummedBytes;
    float sum = 0.0f;
#pragma unroll
    for (int more = 0; more < kSummedBytes; more += sizeof(uint2)) {
      const int byte = first + more;
      const u32 place = swizzled_offset<kTileRowBytes>(row(), byte / kChunkBytes);
      const uint2 found =
          *reinterpret_cast<const uint2*>(shared.probabilities[stage] + place + byte % kChunkBytes);
      sum += sum_of_pair(found.x) + sum_of_pair(found.y);
    }
    total = fmaf(sum, shared.block_units[stage], total);
  }

  __device__ static float sum_of_pair(u32 pair) {
    return cvt_f32(Fp16{}, static_cast<u16>(pair)) + cvt_f32(Fp16{}, static_cast<u16>(pair >> 16));
  }

  // By what a block multiplies all before it by.
  __device__ void rescale(const SharedMemory& shared, int stage) {
    total *= shared.rescale[stage][row()];
  }

  // Leaves what the row has come to.
  __device__ void leave(SharedMemory& shared, int slot) const {
    float sum = total;
#pragma unroll
    for (int lanes = 1; lanes < kSummersOfRow; lanes *= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (fresh_thread() % kSummersOfRow != 0) return;
    shared.row_sum[slot][row()] = sum;
    // A row adds up values by its probabilities.
    const float largest = sum * inverse_of_power(shared.row_units[slot]) * kLargestValue;
    shared.row_scale[slot][row()] = half_scale(largest);
  }
};
