// PV GEMM of one KV tile: O += P V.

#pragma once

#include "accumulators.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "qk_gemm.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "work_tile.cuh"

// Adds the tokens of the tile that are masked for some rows only to the rows that attend to them,
// and zeroes their V: 0 x NaN is NaN, so a masked V must not reach the tensor core.
__device__ inline void pv_gemm_boundary(const Params& params, const Work& work, int first_token,
                                        const Probabilities& probabilities, unsigned char* tokens,
                                        SharedMemoryPlan& smem, Output& output) {
  auto& p = smem.probabilities[warp_index()];
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const u32 packed = probabilities[m][word];
      float* pair = &p[score_row(m, word % 2)][score_token(word / 2, 0)];
      pair[0] = cvt_f32(Element{}, static_cast<u16>(packed));
      pair[1] = cvt_f32(Element{}, static_cast<u16>(packed >> 16));
    }
  }
  __syncwarp();
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int token = 0; token < kWarpTokens; ++token) {
    const int token_idx = first_token + token;
    if (token_idx >= work.unmasked_kv_begin && token_idx < work.unmasked_kv_end) continue;
    u32* row = reinterpret_cast<u32*>(tokens + token * kRowBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!work.attends(params, score_row(m, half), token_idx)) continue;
        const float weight = p[score_row(m, half)][token];
#pragma unroll
        for (int n = 0; n < kSliceDims / 8; ++n) {
          const u32 pair = row[output_dim(n, 0) / 2];
          output[m][n][half * 2] += weight * cvt_f32(Element{}, static_cast<u16>(pair));
          output[m][n][half * 2 + 1] += weight * cvt_f32(Element{}, static_cast<u16>(pair >> 16));
        }
      }
    }
    __syncwarp();
    for (int word = lane_index(); word < kSliceDims / 2; word += kWarpLanes) row[word] = 0;
  }
  __syncwarp();
}

__device__ inline void pv_gemm(const Probabilities& probabilities, const unsigned char* tokens,
                               Output& output) {
  const int lane = lane_index();
  const u32 values = shared_address(tokens) + lane % 16 * kRowBytes + lane / 16 * kChunkBytes;
#pragma unroll
  for (int n = 0; n < kSliceDims / 8; n += 2) {
    u32 v[4];
    ldmatrix_x4_trans(v, values + n * kChunkBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
      mma_m16n8k16(Element{}, output[m][n], probabilities[m], v[0], v[1]);
      mma_m16n8k16(Element{}, output[m][n + 1], probabilities[m], v[2], v[3]);
    }
  }
}
