// MMAs of one KV block: S = Q K^T, and O += P V.

#pragma once

#include "common/mma_fragments.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/warp_matrix.cuh"
#include "work_item.cuh"

// S fragment of one warp: element [m][n][e] belongs to row fragment_row(m, e / 2) and token
// fragment_col(n, e % 2) of the KV block.
using Scores = float[kRowGroups][2][4];

// Q fragments of one k-step: 16 dims of all rows.
using QueryStep = u32[kRowGroups][4];

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
  clear_fragments(scores);
  const int lane = lane_index();
  const u32 keys =
      shared_address(tokens) + (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * kChunkBytes;
#pragma unroll kQueryInRegs ? kHeadDim / 16 : 2
  for (int step = 0; step < kHeadDim / 16; ++step) {
    QueryStep& q = query.steps[kQueryInRegs ? step : 0];
    if (!kQueryInRegs) load_query_step(smem, step, q);
    u32 k[4];
    ldmatrix_x4(k, keys + step * 2 * kChunkBytes);
    mma_columns(scores, 0, q, k);
  }
}

// P of a KV block, rounded, as the A fragments of the PV GEMM: rows and tokens as in Scores.
using Probabilities = u32[kRowGroups][4];

// O fragment of one warp: element [m][n][e] belongs to row fragment_row(m, e / 2) and output dim
// fragment_col(n, e % 2).
using Output = float[kRowGroups][kSliceDims / 8][4];

// Adds the tokens of the KV block that are masked for some rows only to the rows that attend to
// them, and zeroes their V: 0 x NaN is NaN, so a masked V must not reach the tensor core.
__device__ inline void pv_gemm_boundary(const Params& params, const WorkItem& work, int first_token,
                                        const Probabilities& probabilities, unsigned char* tokens,
                                        SharedMemoryPlan& smem, Output& output) {
  auto& p = smem.probabilities[warp_index()];
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const u32 packed = probabilities[m][word];
      float* pair = &p[fragment_row(m, word % 2)][fragment_col(word / 2, 0)];
      pair[0] = cvt_f32(Element{}, static_cast<u16>(packed));
      pair[1] = cvt_f32(Element{}, static_cast<u16>(packed >> 16));
    }
  }
  __syncwarp();
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int token = 0; token < kBlockN; ++token) {
    const int token_idx = first_token + token;
    if (token_idx >= work.unmasked_kv_begin && token_idx < work.unmasked_kv_end) continue;
    if (params.draft_mask != nullptr && work.all_attend(params, token_idx)) continue;
    u32* row = reinterpret_cast<u32*>(tokens + token * kRowBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!work.attends(params, fragment_row(m, half), token_idx)) continue;
        const float weight = p[fragment_row(m, half)][token];
#pragma unroll
        for (int n = 0; n < kSliceDims / 8; ++n) {
          const u32 pair = row[fragment_col(n, 0) / 2];
          add_weighted_pair(output[m][n], half, weight, pair);
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
    mma_columns(output, n, probabilities, v);
  }
}
