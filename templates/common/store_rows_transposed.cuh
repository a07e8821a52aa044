// Writes finished rows.

#pragma once

#include "accumulators.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "output_dims.cuh"
#include "ptx/cvt.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_result.cuh"
#include "softmax/row_state.cuh"

// Two neighbouring dims of a row; eight lanes write 32 bytes.
__device__ inline void store_pair(unsigned char* out, float low, float high) {
  *reinterpret_cast<u32*>(out) = cvt_rn_x2_f32(Element{}, high, low);
}

// What this thread's rows are multiplied by. All warps have all rows: every lane works out some of
// them, and one warp tells of the LSE besides.
__device__ inline void find_factors(const Params& params, const Item& item, const OwnRows& rows,
                                    float (&factors)[kOwnRows]) {
  constexpr int kRowsOfLane = ceil_div(kRows, kWarpLanes);
  const float scale = output_scale(params);
  float found[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    const int row = (i * kWarpLanes + fresh_lane()) % kRows;
    const RowResult result = result_of(params, item, row, rows.state(row));
    found[i] = result.factor * scale;
    if (params.lse != nullptr && fresh_thread() < min(kRows, kWarpLanes) && row < item.rows) {
      params.lse[global_row(params, item, row)] = result.lse;
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    factors[r] = __shfl_sync(~0u, found[r / 2 * 8 / kWarpLanes], own_row(r) % kWarpLanes);
  }
}

__device__ inline void store_rows(const Params& params, const Item& item, SharedMemory&,
                                  const Accumulators& accumulators, const OwnRows& rows) {
  float factors[kOwnRows];
  find_factors(params, item, rows, factors);
  unsigned char* out =
      reinterpret_cast<unsigned char*>(params.out) +
      (global_row(params, item, own_row(0)) * kHeadDimVo + dim_of(fresh_warp(), 0)) * 2;
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    if (own_row(r) >= item.rows) continue;
    unsigned char* target = out + (r / 2 * 8 + r % 2) * kHeadDimVo * 2;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* of = accumulators[tile] + r / 2 * 4 + r % 2;
      store_pair(target + tile * kDimsOfTile * 2, of[0] * factors[r], of[2] * factors[r]);
    }
  }
}

// Writes some tasks from `first` on, after merging: of the same rows, one tile of dims after the
// other.
template <int kCount>
__device__ inline void store_tasks(const Params& params, const Item& item, SharedMemory&, int first,
                                   const float4 (&values)[kCount]) {
  const TaskRows rows = task_rows(first);
  const int dim = dim_of(warp_of_task(first), accumulator_of_task(first));
  unsigned char* out = reinterpret_cast<unsigned char*>(params.out) +
                       (global_row(params, item, rows.a) * kHeadDimVo + dim) * 2;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    unsigned char* target = out + n * kDimsOfTile * 2;
    if (rows.a < item.rows) store_pair(target, values[n].x, values[n].z);
    if (rows.b < item.rows) store_pair(target + kHeadDimVo * 2, values[n].y, values[n].w);
  }
}
