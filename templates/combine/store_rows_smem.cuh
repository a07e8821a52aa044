// Epilogue stores with swap-AB, where the states of the rows are in shared memory: rows of O, and
// the partial softmax states of a split.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/row_scale.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"
#include "softmax/work_rows.cuh"
#include "thread_rows.cuh"

// Two adjacent dims of a row; eight lanes write 32 bytes.
__device__ inline void store_pair(unsigned char* out, float low, float high) {
  *reinterpret_cast<u32*>(out) = cvt_rn_x2_f32(Element{}, high, low);
}

// The scales of this thread's rows.
__device__ inline void load_row_scales(const ThreadRows& rows, float (&scales)[kRowsPerThread]) {
  const float* own = &rows.smem.row_scale[rows.stage][row_of(0)];
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const float2 pair = *reinterpret_cast<const float2*>(own + group * 8);
    scales[group * 2] = pair.x;
    scales[group * 2 + 1] = pair.y;
  }
}

__device__ inline void store_rows(const Params& params, const WorkItem& work, SharedMemoryPlan&,
                                  const Accumulators& accumulators, const ThreadRows& rows) {
  float factors[kRowsPerThread];
  load_row_scales(rows, factors);
  unsigned char* out =
      reinterpret_cast<unsigned char*>(params.out) +
      (global_row(params, work, row_of(0)) * kHeadDimVo + dim_of(reload_warp(), 0)) * 2;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (row_of(r) >= work.rows) continue;
    unsigned char* target = out + (r / 2 * 8 + r % 2) * kHeadDimVo * 2;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* acc = accumulators[tile] + r / 2 * 4 + r % 2;
      store_pair(target + tile * kTileDims * 2, acc[0] * factors[r], acc[2] * factors[r]);
    }
  }
}

// Stores `kCount` reduced fragments from `first` on: same rows, consecutive dim tiles.
template <int kCount>
__device__ inline void store_frags(const Params& params, const WorkItem& work, SharedMemoryPlan&,
                                   int first, const float4 (&values)[kCount]) {
  const FragRows rows = frag_rows(first);
  const int dim = dim_of(warp_of_frag(first), accumulator_of_frag(first));
  unsigned char* out = reinterpret_cast<unsigned char*>(params.out) +
                       (global_row(params, work, rows.a) * kHeadDimVo + dim) * 2;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    unsigned char* target = out + n * kTileDims * 2;
    if (rows.a < work.rows) store_pair(target, values[n].x, values[n].z);
    if (rows.b < work.rows) store_pair(target + kHeadDimVo * 2, values[n].y, values[n].w);
  }
}

__device__ inline void compute_fp16_scales(SharedMemoryPlan&, const Accumulators&,
                                           const ThreadRows& rows,
                                           float (&scales)[kRowsPerThread]) {
  load_row_scales(rows, scales);
}

// Of a pairwise combine. All warps hold all rows, so one thread for each row adds the states, and
// publishes the weights in place of states, and the scale of the final row. A barrier follows.
struct RowPairs {
  const PairWeights* weights;

  __device__ RowPairs(const Params& params, const WorkItem& work, const CombineSmem& combine_smem,
                      const PartialState* others, const ThreadRows& rows) {
    PairWeights* published = reinterpret_cast<PairWeights*>(combine_smem.states(0));
    weights = published;
    const int row = reload_tid();
    if (row < kBlockM) {
      RowState own = rows.state(row);
      published[row] = combine_pair_states(own, others + row, 0);
      rows.smem.row_scale[rows.stage][row] = final_row_scale(params, work, row, own);
    }
  }

  __device__ PairWeights operator[](int r) const { return weights[row_of(r)]; }
};

__device__ inline void store_partial_states(PartialState* target, const ThreadRows& rows,
                                            const float (&)[kRowsPerThread]) {
  const int row = reload_tid();
  if (row >= kBlockM) return;
  const RowState state = rows.state(row);
  target[row] = {
      state.row_max, state.row_sum, {inverse_of_pow2(rows.smem.row_scale[rows.stage][row])}};
}
static_assert(kIsSame<decltype(SharedMemoryPlan::row_scale), float[2][kBlockM]>,
              "scale of each row of O as the epilogue stores it");
static_assert(kNumScales == 1 && kBlockM <= kPvThreads, "there is a thread for each row");
