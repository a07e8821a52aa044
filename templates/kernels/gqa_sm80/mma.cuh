// MMAs of one KV tile: S = Q K^T, and O += P V.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "work_tile.cuh"

// S fragment of one warp, as mma lays it out: element [m][n][e] belongs to row score_row(m, e / 2)
// and token score_token(n, e % 2) of the tile.
using Scores = float[kRowGroups][2][4];

// Q fragments of one k-step: 16 dims of all rows.
using QueryStep = u32[kRowGroups][4];

__device__ inline int score_row(int group, int half) {
  return group * 16 + half * 8 + lane_index() / 4;
}

__device__ inline int score_token(int group, int parity) {
  return group * 8 + lane_index() % 4 * 2 + parity;
}

__device__ inline void load_query_step(const SharedMemoryPlan& smem, int step, QueryStep& query) {
  const u32 rows =
      shared_address(smem.query) + (step * 2 + lane_index() / 16) * static_cast<int>(kChunkBytes);
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
    ldmatrix_x4(query[m], rows + (m * 16 + lane_index() % 16) * kRowBytes);
  }
}

// Q fragments in registers if they fit; else scratch for the fragments of one k-step.
struct QueryFragments {
  QueryStep steps[kQueryInRegs ? kHeadDim / 16 : 1];

  __device__ explicit QueryFragments(const SharedMemoryPlan& smem) {
    if (!kQueryInRegs) return;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) load_query_step(smem, step, steps[step]);
  }
};

__device__ inline void qk_gemm(const SharedMemoryPlan& smem, QueryFragments& query,
                               const unsigned char* tokens, Scores& scores) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0f;
    }
  }
  const int lane = lane_index();
  const u32 keys =
      shared_address(tokens) + (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * kChunkBytes;
#pragma unroll kQueryInRegs ? kHeadDim / 16 : 2
  for (int step = 0; step < kHeadDim / 16; ++step) {
    QueryStep& q = query.steps[kQueryInRegs ? step : 0];
    if (!kQueryInRegs) load_query_step(smem, step, q);
    u32 k[4];
    ldmatrix_x4(k, keys + step * 2 * kChunkBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
      mma_m16n8k16(Element{}, scores[m][0], q[m], k[0], k[1]);
      mma_m16n8k16(Element{}, scores[m][1], q[m], k[2], k[3]);
    }
  }
}

// P of a KV tile, rounded, as the A fragments of the PV GEMM: rows and tokens as in Scores.
using Probabilities = u32[kRowGroups][4];

// O accumulators of one warp, in mma fragment layout: element [m][n][e] belongs to row
// score_row(m, e / 2) and output dim output_dim(n, e % 2).
using Output = float[kRowGroups][kSliceDims / 8][4];

__device__ inline int output_dim(int group, int parity) {
  return group * 8 + lane_index() % 4 * 2 + parity;
}

__device__ inline void clear_output(Output& output) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < kSliceDims / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[m][n][e] = 0.0f;
    }
  }
}

// Rescales this lane's fragment of one row.
__device__ inline void rescale_output(int group, int half, float factor, Output& output) {
#pragma unroll
  for (int n = 0; n < kSliceDims / 8; ++n) {
    output[group][n][half * 2] *= factor;
    output[group][n][half * 2 + 1] *= factor;
  }
}

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
