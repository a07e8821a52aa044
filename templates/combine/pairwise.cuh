// Pairwise combine: a work tile with two splits, one of which is still in registers.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/reduce_group.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"
#include "thread_rows.cuh"

// Weights of a row: of this CTA's split, and of the other one as it is stored, in fp16.
struct PairWeights {
  float own;
  float other;
};

// Adds the state of the other split of a row to that of this one.
__device__ inline PairWeights combine_pair_states(RowState& own, const PartialState& other,
                                                  int scale) {
  const RowState states[2] = {own, other};
  float weights[2];
  own.row_max = max_of(states);
  own.row_sum = weigh(states, own.row_max, weights);
  return {weights[0], weights[1] * other.scales[scale]};
}

// Weights of the rows of this thread, by where the states of this split are. In shared memory: all
// warps hold all rows, so one thread per row computes its weights, and they overwrite the loaded
// state. When two CTAs exchange halves, the other reduce group of this CTA has already read the
// states: the awaited count includes its arrival.
template <typename Rows>
struct RowPairs {
  const CombineSmem& combine_smem;

  __device__ RowPairs(const ReduceGroup& reduce_group, const CombineSmem& loaded, Rows& rows)
      : combine_smem(loaded) {
    const int row = reduce_group.thread_idx();
    if (row < kBlockM) {
      PartialState& state = combine_smem.state(0, row);
      RowState own = rows.state(row);
      const PairWeights weights = combine_pair_states(own, state, 0);
      rows.set_state(row, own);
      state.row_max = weights.own;
      state.row_sum = weights.other;
    }
    reduce_group.sync();
  }

  __device__ PairWeights operator[](int r) const {
    const RowState& weights = combine_smem.state(0, row_of(r));
    return {weights.row_max, weights.row_sum};
  }
};

// In registers.
template <int kCount>
struct RowPairs<RowState[kCount]> {
  PairWeights weights[kCount];

  __device__ RowPairs(const ReduceGroup&, const CombineSmem& combine_smem,
                      RowState (&rows)[kCount]) {
    const int scale = scale_of_warp(reload_warp());
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
      weights[r] = combine_pair_states(rows[r], combine_smem.state(0, row_of(r)), scale);
    }
  }

  __device__ PairWeights operator[](int r) const { return weights[r]; }
};

// Adds the other split, loaded into shared memory, to the accumulators and the states of the rows.
__device__ inline void accumulate_partial(const ReduceGroup& reduce_group,
                                          const CombineSmem& combine_smem,
                                          Accumulators& accumulators, ThreadRows& rows) {
  const RowPairs<ThreadRows> pairs(reduce_group, combine_smem, rows);
  const uint2* values =
      combine_smem.values(0) + lane_frag_offset() - combine_smem.first_frag * kWarpLanes;
  // Weights stay in registers for the fragments of a pair of rows: loads for each fragment take
  // registers from the PV loop of mla_sm90_fp8.
  constexpr int kRowPairs = kRowsPerThread / 2;
  constexpr int kFragsPerRowPair = kAccumulators / kRowPairs;
#pragma unroll
  for (int pair = 0; pair < kRowPairs; ++pair) {
    const PairWeights a = pairs[pair * 2];
    const PairWeights b = pairs[pair * 2 + 1];
#pragma unroll
    for (int frag = 0; frag < kFragsPerRowPair; ++frag) {
      const int i = accumulator_in_frag_order(pair * kFragsPerRowPair + frag);
      const float4 other = unpack_half4(values[frag_offset(i) * kWarpLanes]);
      const float4 own = weighted(accumulator(accumulators, i), a.own, b.own);
      set_accumulator(accumulators, i, accumulate_frag(own, other, a.other, b.other));
      // Limits the loads in flight: registers are scarce.
      const bool is_last = frag == kFragsPerRowPair - 1;
      if (is_last || frag % kFragsPerStep == kFragsPerStep - 1) __syncwarp();
    }
  }
}

static_assert(kBlockM * sizeof(PartialState) + kNumFrags * kFragBytes <= kCombineSmemBytes,
              "the other split of a pair fits");

// Combines the other split into this one: by the first CTA, or by both CTAs, each for the half of
// the accumulators that it keeps.
__device__ inline void combine_pair(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                    Accumulators& accumulators, ThreadRows& rows) {
  semaphore_wait(params, work, reduce_group);
  const int num_frags = reduce_group.half < 0 ? kNumFrags : kNumFrags / 2;
  const CombineSmem combine_smem = {
      smem.query, 1, 0, kBlockM, max(reduce_group.half, 0) * num_frags, num_frags};
  const PartialSlots slots(params, work);
  const int row = reduce_group.thread_idx();
  if (row < kBlockM) {
    cp_async_cg_16(shared_address(&combine_smem.state(0, row)),
                   partial_states(params, slots[1 - work.split_idx]) + row, kChunkBytes);
  }
  load_partial_values(params, slots, reduce_group, combine_smem, 1 - work.split_idx,
                      work.split_idx);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  reduce_group.sync();
  accumulate_partial(reduce_group, combine_smem, accumulators, rows);
}
