// QK GEMM of one KV tile: S = Q K^T.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "shared_memory.cuh"

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
