// Epilogue stores with swap-AB, where the states of the rows are in shared memory: rows of O and
// their LSE, and the partial softmax states of a split.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/reduce_group.cuh"
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

// Normalization factors of this thread's rows. All warps hold all rows: every lane computes some
// of the factors, and one warp also stores the LSE.
__device__ inline void compute_row_factors(const Params& params, const WorkItem& work,
                                           const ThreadRows& rows,
                                           float (&factors)[kRowsPerThread]) {
  constexpr int kRowsPerLane = ceil_div(kBlockM, kWarpLanes);
  const float scale = output_scale(params);
  float found[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int row = (i * kWarpLanes + reload_lane()) % kBlockM;
    const RowResult result = result_of(params, rows.state(row), sink_of(params, work, row));
    found[i] = result.factor * scale;
    if (params.lse != nullptr && reload_tid() < min(kBlockM, kWarpLanes) && row < work.rows) {
      params.lse[global_row(params, work, row)] = result.lse;
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    factors[r] = __shfl_sync(~0u, found[r / 2 * 8 / kWarpLanes], row_of(r) % kWarpLanes);
  }
}

__device__ inline void store_rows(const Params& params, const WorkItem& work, SharedMemoryPlan&,
                                  const Accumulators& accumulators, const ThreadRows& rows) {
  float factors[kRowsPerThread];
  compute_row_factors(params, work, rows, factors);
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

__device__ inline void compute_fp16_scales(SharedMemoryPlan& smem, const ReduceGroup&,
                                           const Accumulators&, const ThreadRows& rows,
                                           float (&scales)[kRowsPerThread]) {
  const float* own = &smem.row_scale[rows.stage][row_of(0)];
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const float2 pair = *reinterpret_cast<const float2*>(own + group * 8);
    scales[group * 2] = pair.x;
    scales[group * 2 + 1] = pair.y;
  }
}

__device__ inline void store_partial_states(PartialState* target, const ReduceGroup& reduce_group,
                                            const ThreadRows& rows,
                                            const float (&)[kRowsPerThread]) {
  const int row = reduce_group.thread_idx();
  if (row >= kBlockM) return;
  const RowState state = rows.state(row);
  target[row] = {
      state.row_max, state.row_sum, {inverse_of_pow2(rows.smem.row_scale[rows.stage][row])}};
}
static_assert(kIsSame<decltype(SharedMemoryPlan::row_scale), float[2][kBlockM]>,
              "fp16 scale of each row of partial O");
static_assert(kNumScales == 1 && kBlockM <= kPvThreads / 2,
              "a reduce group has a thread for each row");
