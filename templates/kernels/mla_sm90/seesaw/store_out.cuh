// Epilogue stores of O: rows through staging, and reduced fragments.

#pragma once

#include "accumulators.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/warp_matrix.cuh"
#include "row_amax.cuh"
#include "row_results.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/work_rows.cuh"
#include "thread_rows.cuh"

// Each warp stages 16 rows of 32 dims in its own buffer, so that global stores are 64 contiguous
// bytes per row.
constexpr int kStagedDims = 32;
constexpr int kStagedBytes = kStagedDims * 2;
constexpr int kStagedFrags = kStagedDims / 8;

struct RowWriter {
  const unsigned char* staging;
  unsigned char* out;  // of the first row
  int rows;  // not padding, from the first on

  __device__ RowWriter(const Params& params, const WorkItem& work, const SharedMemoryPlan& smem,
                       int first_row)
      : staging(smem.staging[reload_warp()]),
        out(reinterpret_cast<unsigned char*>(params.out) +
            global_row(params, work, first_row) * (kHeadDimVo * 2)),
        rows(work.rows - first_row) {}

  // Called by a whole warp. Stores `chunks` chunks of eight dims from `first_dim` on; `pairs` is in
  // the accumulator layout of wgmma, two rows per lane.
  __device__ void write(const u32 (&pairs)[kStagedFrags][kRowsPerThread], int first_dim,
                        int chunks) const {
    const int lane = reload_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stmatrix_x4(
          shared_address(staging) + swizzled_offset<kStagedBytes>(lane % 16, half * 2 + lane / 16),
          pairs[half * 2][0], pairs[half * 2][1], pairs[half * 2 + 1][0], pairs[half * 2 + 1][1]);
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      const int chunk = lane % 4;
      const uint4 value =
          *reinterpret_cast<const uint4*>(staging + swizzled_offset<kStagedBytes>(row, chunk));
      if (row < rows && chunk < chunks) {
        *reinterpret_cast<uint4*>(out + row * (kHeadDimVo * 2) + first_dim * 2 +
                                  chunk * kChunkBytes) = value;
      }
    }
    __syncwarp();
  }
};

__device__ inline void store_rows(const Params& params, const WorkItem& work,
                                  SharedMemoryPlan& smem, const Accumulators& accumulators,
                                  const ThreadRows& rows) {
  const int thread = reload_tid();
  float factor[kRowsPerThread];
  compute_row_factors(params, work, rows, is_row_writer(thread), factor);
  const int warp = thread / kWarpLanes;
  const RowWriter writer(params, work, smem, warp % 4 * kRowsPerGroup);
#pragma unroll
  for (int step = 0; step < kAccumulators / kStagedFrags; ++step) {
    u32 pairs[kStagedFrags][kRowsPerThread];
#pragma unroll
    for (int n = 0; n < kStagedFrags; ++n) {
      const float4 value = weighted(accumulator(accumulators, step * kStagedFrags + n), factor, n);
      pairs[n][0] = cvt_rn_x2_f32(Element{}, value.y, value.x);
      pairs[n][1] = cvt_rn_x2_f32(Element{}, value.w, value.z);
    }
    writer.write(pairs, warp / 4 * kHalfDims + step * kStagedDims, kStagedFrags);
  }
}

// Stores kCount combined fragments from `first` on.
template <int kCount>
__device__ inline void store_frags(const Params& params, const WorkItem& work,
                                   const SharedMemoryPlan& smem, u32 first,
                                   const float4 (&values)[kCount]) {
  u32 pairs[kStagedFrags][kRowsPerThread] = {};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    pairs[n][0] = cvt_rn_x2_f32(Element{}, values[n].y, values[n].x);
    pairs[n][1] = cvt_rn_x2_f32(Element{}, values[n].w, values[n].z);
  }
  const RowWriter writer(params, work, smem, first / kFragsPerRowGroup * kRowsPerGroup);
  writer.write(pairs, first % kFragsPerRowGroup * 8, kCount);
}
