// From what both consumers have of an item to finished or partial rows.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "no_swap_ab/mainloop.cuh"
#include "no_swap_ab/mma_operands.cuh"
#include "no_swap_ab/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/setmaxnreg.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_reduce.cuh"
#include "softmax/softmax_scale.cuh"

// The sums of both consumers, whose references are the same by now.
__device__ inline void join_sums(SharedMemory& shared, const Softmax& softmax, OwnRows& rows) {
  const int thread = fresh_thread();
  const int row = row_of_thread(thread);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const float sum = row_total(softmax.sum[r]);
    if (thread % 4 == 0) shared.row_sum[thread / 128][row + 8 * r] = sum;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    rows[r] = {softmax.reference[r],
               shared.row_sum[0][row + 8 * r] + shared.row_sum[1][row + 8 * r]};
  }
}

// What lasts from item to item.
struct ConsumerState {
  Descriptors descriptors;
  float scale;
  u32 parity = 0;

  __device__ ConsumerState(const Params& params, const SharedMemory& shared)
      : descriptors(shared), scale(score_scale(params) * kLog2E) {}
};

__device__ inline void consume_item(const Params& params, const Item& item, SharedMemory& shared,
                                    ConsumerState& state) {
  Consumer consumer(params, shared, item, state.descriptors, state.scale, state.parity);
  if (item.blocks > 0) {
    consumer.take_item();
  } else {
    // When all warps have seen the query come; products would see to that.
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    consumer.release_query();
  }
  OwnRows rows;
  join_sums(shared, consumer.softmax, rows);
  store_item(params, item, shared, consumer.accumulators, rows);
}

// Of 168 that a thread has at first, those who load give most to those who multiply.
__device__ inline void give_registers_back() { setmaxnreg_dec<kProducerRegisters>(); }
__device__ inline void take_registers() { setmaxnreg_inc<kConsumerRegisters>(); }
