// Work item of the consumer warpgroup, swap-AB: mainloop, row-sum reduction, epilogue.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/online_softmax.cuh"
#include "swap_ab/mainloop.cuh"

// Sums over the eight lanes that hold the same rows.
__device__ inline float sum_over_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value += __shfl_xor_sync(~0u, value, lanes);
  }
  return value;
}

// Reduces the row sum l over the warps, each of which has other tokens.
__device__ inline void reduce_row_sum(SharedMemoryPlan& smem, const Consumer& consumer,
                                      ThreadRows& rows) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float row_sum = sum_over_lanes(consumer.row_sum[r]);
    if (reload_lane() < 4) smem.warp_rows[reload_warp()][row_of(r)] = row_sum;
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float row_sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) row_sum += smem.warp_rows[warp][row_of(r)];
    rows[r] = {consumer.row_max[r], row_sum};
  }
}

// State that persists across work items.
struct ConsumerState {
  float scale;
  PipelineState<kStages> pipe;
  u32 p_buffer = 0;

  __device__ ConsumerState(const Params& params, const SharedMemoryPlan&)
      : scale(score_scale(params) * kLog2E) {}
};

__device__ inline void process_work(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, ConsumerState& state) {
  Consumer consumer(params, smem, work, state.scale, state.pipe, state.p_buffer);
  const int end = work.first_kv_block + work.num_kv_blocks;
#pragma unroll 1
  for (int kv_block = work.first_kv_block; kv_block < end; ++kv_block)
    consumer.process_block(kv_block);
  // Without KV blocks no barrier of the mainloop orders the warps' waits for Q before its release.
  if (work.num_kv_blocks == 0) named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (reload_tid() == 0) arrive(smem.query_empty);
  ThreadRows rows;
  reduce_row_sum(smem, consumer, rows);
  epilogue(params, work, smem, consumer.accumulators, rows);
}

// The registers of a thread at launch suffice for all roles: no setmaxnreg.
__device__ inline void producer_reg_dealloc() {}
__device__ inline void consumer_reg_alloc() {}
