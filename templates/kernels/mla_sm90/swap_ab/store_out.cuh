// Epilogue stores of O^T: rows through staging, and reduced fragments.

#pragma once

#include "accumulators.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
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

// Each warp stages 16 dims of every row in its own buffer, so that global stores are 32 contiguous
// bytes per row.
constexpr int kStagedBytes = 32;

__device__ inline void store_rows(const Params& params, const WorkItem& work,
                                  SharedMemoryPlan& smem, const Accumulators& accumulators,
                                  const ThreadRows& rows) {
  const int lane = reload_lane();
  const int warp = reload_warp();
  float factor[kRowsPerThread];
  compute_row_factors(params, work, rows, is_row_writer(reload_tid()), factor);
  unsigned char* staging = smem.staging[warp];
  const u32 address = shared_address(staging) + (lane / 16 * 8 + lane % 8) * kStagedBytes +
                      lane / 8 % 2 * kChunkBytes;
  unsigned char* out = reinterpret_cast<unsigned char*>(params.out) +
                       global_row(params, work, 0) * (kHeadDimVo * 2) + warp * kStagedBytes;
#pragma unroll
  for (int tile = 0; tile < kLatentTiles; ++tile) {
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      const float* a = accumulators[tile] + group * 4;
      const float* f = factor + group * 2;
      stmatrix_x4_trans(address + group * 8 * kStagedBytes,
                        cvt_rn_x2_f32(Element{}, a[1] * f[1], a[0] * f[0]),
                        cvt_rn_x2_f32(Element{}, a[3] * f[1], a[2] * f[0]),
                        cvt_rn_x2_f32(Element{}, a[5] * f[3], a[4] * f[2]),
                        cvt_rn_x2_f32(Element{}, a[7] * f[3], a[6] * f[2]));
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < kBlockM / 16; ++half) {
      const int row = half * 16 + lane / 2;
      const int chunk = lane % 2;
      const uint4 value =
          *reinterpret_cast<const uint4*>(staging + row * kStagedBytes + chunk * kChunkBytes);
      if (row < work.rows) {
        *reinterpret_cast<uint4*>(out + row * (kHeadDimVo * 2) + tile * kTileRowBytes +
                                  chunk * kChunkBytes) = value;
      }
    }
    __syncwarp();
  }
}

// Stores kCount combined fragments from `first` on: the same rows, consecutive tiles of dims.
template <int kCount>
__device__ inline void store_frags(const Params& params, const WorkItem& work, SharedMemoryPlan&,
                                   int first, const float4 (&values)[kCount]) {
  const FragRows rows = frag_rows(first);
  const int dim = dim_of(warp_of_frag(first), accumulator_of_frag(first));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = r == 0 ? rows.a : rows.b;
    if (row >= work.rows) continue;
    u16* out = params.out + global_row(params, work, row) * kHeadDimVo + dim;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const u32 pair = cvt_rn_x2_f32(Element{}, (r == 0 ? values[n].z : values[n].w),
                                     (r == 0 ? values[n].x : values[n].y));
      out[n * kTileElements] = static_cast<u16>(pair);
      out[n * kTileElements + 8] = static_cast<u16>(pair >> 16);
    }
  }
}
