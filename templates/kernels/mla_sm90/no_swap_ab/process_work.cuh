// Work item of the two consumer warpgroups: mainloop, row-sum reduction, epilogue.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "no_swap_ab/mainloop.cuh"
#include "no_swap_ab/mma_operands.cuh"
#include "no_swap_ab/softmax.cuh"
#include "ptx/setmaxnreg.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/online_softmax.cuh"

// Adds the row sums l of both warpgroups, which have the same row max at the end of the mainloop.
__device__ inline void reduce_row_sum(SharedMemoryPlan& smem, const Softmax& softmax,
                                      ThreadRows& rows) {
  const int thread = reload_tid();
  const int row = row_of_thread(thread);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float row_sum = quad_reduce_sum(softmax.row_sum[r]);
    if (thread % 4 == 0) smem.row_sum[thread / 128][row + 8 * r] = row_sum;
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    rows[r] = {softmax.row_max[r], smem.row_sum[0][row + 8 * r] + smem.row_sum[1][row + 8 * r]};
  }
}

// State that persists across work items.
struct ConsumerState {
  Descriptors descriptors;
  float scale;
  u32 phase = 0;

  __device__ ConsumerState(const Params& params, const SharedMemoryPlan& smem)
      : descriptors(smem), scale(score_scale(params) * kLog2E) {}
};

__device__ inline void process_work(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, ConsumerState& state) {
  Consumer consumer(params, smem, work, state.descriptors, state.scale, state.phase);
  if (work.num_kv_blocks > 0) {
    consumer.process_work();
  } else {
    // Without KV blocks no MMA orders the warps' waits for Q before its release.
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    consumer.release_query();
  }
  ThreadRows rows;
  reduce_row_sum(smem, consumer.softmax, rows);
  epilogue(params, work, smem, consumer.accumulators, rows);
}

// A thread has 168 registers at launch; the producer warpgroup gives most of its own to consumers.
__device__ inline void producer_reg_dealloc() { setmaxnreg_dec<kProducerRegs>(); }
__device__ inline void consumer_reg_alloc() { setmaxnreg_inc<kConsumerRegs>(); }
