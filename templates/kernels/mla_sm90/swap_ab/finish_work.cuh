// From what the consumer has of an item to finished or partial rows.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/softmax_scale.cuh"
#include "swap_ab/mainloop.cuh"

// Over the lanes that have the same rows.
__device__ inline float total_of_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value += __shfl_xor_sync(~0u, value, lanes);
  }
  return value;
}

// The sums of all warps.
__device__ inline void join_sums(SharedMemory& shared, const Consumer& consumer, OwnRows& rows) {
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const float sum = total_of_lanes(consumer.sum[r]);
    if (fresh_lane() < 4) shared.warp_rows[fresh_warp()][own_row(r)] = sum;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) sum += shared.warp_rows[warp][own_row(r)];
    rows[r] = {consumer.reference[r], sum};
  }
}

// What lasts from item to item.
struct ConsumerState {
  float scale;
  RingPosition<kStages> position;
  u32 buffer = 0;

  __device__ ConsumerState(const Params& params, const SharedMemory&)
      : scale(score_scale(params) * kLog2E) {}
};

__device__ inline void consume_item(const Params& params, const Item& item, SharedMemory& shared,
                                    ConsumerState& state) {
  Consumer consumer(params, shared, item, state.scale, state.position, state.buffer);
  const int end = item.first_block + item.blocks;
#pragma unroll 1
  for (int block = item.first_block; block < end; ++block) consumer.take_block(block);
  // When all warps have seen the query come; products would see to that.
  if (item.blocks == 0) barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (fresh_thread() == 0) arrive_at(shared.query_empty);
  OwnRows rows;
  join_sums(shared, consumer, rows);
  store_item(params, item, shared, consumer.accumulators, rows);
}

// All threads have as many as they need.
__device__ inline void give_registers_back() {}
__device__ inline void take_registers() {}
