// Writes finished rows. Needs accumulators.cuh, row_state.cuh, blocks/swizzle.cuh, ptx/cvt.cuh,
// ptx/stmatrix.cuh.

// Through a piece of shared memory that each warp has of its own: 16 rows of 32 dims, so that rows
// leave in 64 bytes.
constexpr int kStagedDims = 32;
constexpr int kStagedBytes = kStagedDims * 2;

__device__ inline void store_rows(const Params& params, const Item& item, SharedMemory& shared,
                                  const Accumulators& accumulators,
                                  const RowState (&rows)[kOwnRows]) {
  const int thread = fresh_thread();
  const int lane = thread % kWarpLanes;
  const int warp = thread / kWarpLanes;
  const float scale = output_scale(params);
  float factor[kOwnRows];
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const int row = row_of_thread(thread) + 8 * r;
    const RowResult result = result_of(params, item, row, rows[r]);
    factor[r] = result.factor * scale;
    if (params.lse != nullptr && thread < 128 && lane % 4 == 0 && row < item.rows) {
      params.lse[global_row(params, item, row)] = result.lse * params.lse_factor;
    }
  }
  unsigned char* staging = shared.staging[warp];
  const u32 address = shared_address(staging);
  const int first_row = warp % 4 * 16;
  unsigned char* out = reinterpret_cast<unsigned char*>(params.out) +
                       global_row(params, item, first_row) * (kHeadDimVo * 2) +
                       (thread < 128 ? 0 : kHalfDims * 2);
#pragma unroll
  for (int step = 0; step < kHalfDims / kStagedDims; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* a = accumulators + (step * 2 + half) * 8;
      stmatrix_x4(address + swizzled_offset<kStagedBytes>(lane % 16, half * 2 + lane / 16),
                  cvt_rn_x2_f32(Element{}, a[1] * factor[0], a[0] * factor[0]),
                  cvt_rn_x2_f32(Element{}, a[3] * factor[1], a[2] * factor[1]),
                  cvt_rn_x2_f32(Element{}, a[5] * factor[0], a[4] * factor[0]),
                  cvt_rn_x2_f32(Element{}, a[7] * factor[1], a[6] * factor[1]));
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      const int chunk = lane % 4;
      const uint4 value =
          *reinterpret_cast<const uint4*>(staging + swizzled_offset<kStagedBytes>(row, chunk));
      if (first_row + row < item.rows) {
        *reinterpret_cast<uint4*>(out + row * (kHeadDimVo * 2) + step * kStagedBytes +
                                  chunk * kChunkBytes) = value;
      }
    }
    __syncwarp();
  }
}

// Writes a float4 of float4 `i` of a thread of warp `warp`, after merging.
__device__ inline void store_slice(const Params& params, const Item& item, int i, int warp,
                                   float4 value) {
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const int row = row_of(warp, r);
    if (row >= item.rows) continue;
    const u32 pair = r == 0 ? cvt_rn_x2_f32(Element{}, value.y, value.x)
                            : cvt_rn_x2_f32(Element{}, value.w, value.z);
    *reinterpret_cast<u32*>(params.out + global_row(params, item, row) * kHeadDimVo +
                            dim_of(warp, i)) = pair;
  }
}
