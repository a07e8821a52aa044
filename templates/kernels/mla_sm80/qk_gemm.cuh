// QK GEMM of one KV tile: S = Q K^T.

#pragma once

#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "shared_memory.cuh"

// S fragment of one warp, as mma lays it out: element [m][n][e] belongs to
// row score_row(m, e / 2) and tile token score_token(n, e % 2).
using Scores = float[kScoreRowGroups][kScoreTokenGroups][4];

// kDimWarps adjacent token warps cooperate: each takes the tokens of all of them and a part of the
// dims, which reads shared memory less often than a narrow MMA over all dims.
constexpr int kProductTokenGroups = kScoreTokenGroups * kDimWarps;
using PartialScores = float[kScoreRowGroups][kProductTokenGroups][4];

// Steps of 16 dims whose K fragments are loaded together.
constexpr int kKeySteps = kProductTokenGroups % 2 == 0 ? 1 : 2;

__device__ inline int token_warp() { return warp_index() % kTokenWarps; }
__device__ inline int dim_warp() { return warp_index() % kDimWarps; }

__device__ inline int score_row(int group, int half) {
  const int row_warp = warp_index() / kTokenWarps;
  return (row_warp * kScoreRowGroups + group) * 16 + half * 8 + lane_index() / 4;
}

__device__ inline int score_token(int group, int parity) {
  return (token_warp() * kScoreTokenGroups + group) * 8 + lane_index() % 4 * 2 + parity;
}

// MMAs over this warp's dims: of every 64, the 32 or 64 that belong to it.
__device__ inline void qk_gemm_dims(const SharedMemoryPlan& smem, const unsigned char* tokens,
                                    PartialScores& partial_scores) {
  const int lane = lane_index();
  const u32 query = shared_address(smem.query);
  const u32 keys = shared_address(tokens);
  const int query_row = warp_index() / kTokenWarps * kScoreRowGroups * 16 + lane % 16;
  const int key_row = token_warp() / kDimWarps * kProductTokenGroups * 8 + lane % 8;

#pragma unroll
  for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < kProductTokenGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) partial_scores[m][n][e] = 0.0f;
    }
  }

  // Not unrolled: the addresses of all steps at once would spill.
#pragma unroll 1
  for (int column = 0; column < kTokenBytes; column += 128) {
#pragma unroll
    for (int step = 0; step < 4 / kDimWarps; step += kKeySteps) {
      const int first_chunk = dim_warp() * 4 + step * 2;
      // One ldmatrix loads two fragments: of two token groups, or of two steps of a single one.
      u32 k[kProductTokenGroups * kKeySteps / 2][4];
#pragma unroll
      for (int load = 0; load < kProductTokenGroups * kKeySteps / 2; ++load) {
        const int fragment = load * 2 + lane / 16;
        const int chunk = first_chunk + fragment % kKeySteps * 2 + lane / 8 % 2;
        ldmatrix_x4(k[load],
                    keys + column +
                        swizzled_offset<kTokenBytes>(key_row + fragment / kKeySteps * 8, chunk));
      }
#pragma unroll
      for (int half = 0; half < kKeySteps; ++half) {
#pragma unroll
        for (int m = 0; m < kScoreRowGroups; ++m) {
          u32 q[4];
          const int chunk = first_chunk + half * 2 + lane / 16;
          ldmatrix_x4(q, query + column + swizzled_offset<kTokenBytes>(query_row + m * 16, chunk));
#pragma unroll
          for (int n = 0; n < kProductTokenGroups; ++n) {
            const int fragment = n * kKeySteps + half;
            mma_m16n8k16(Element{}, partial_scores[m][n], q, k[fragment / 2][fragment % 2 * 2],
                         k[fragment / 2][fragment % 2 * 2 + 1]);
          }
        }
      }
    }
  }
}

// Reduces S over dims with the partner warps: each sends the partial scores of the others' tokens
// and adds those it receives. `scratch` is free until the barrier after the next one.
__device__ inline void reduce_partial_scores(const PartialScores& partial_scores, float* scratch,
                                             Scores& scores) {
  static_assert(kDimWarps <= 2, "a warp has one partner");
  constexpr int kExchanged = kScoreRowGroups * kScoreTokenGroups * 4;
  const bool is_second = dim_warp() == 1;
  float* sent = scratch + (warp_index() ^ 1) * kExchanged * kWarpLanes + lane_index();
  float* received = scratch + warp_index() * kExchanged * kWarpLanes + lane_index();
#pragma unroll
  for (int i = 0; i < kExchanged; ++i) {
    const int m = i / (kScoreTokenGroups * 4), n = i / 4 % kScoreTokenGroups, e = i % 4;
    sent[i * kWarpLanes] =
        is_second ? partial_scores[m][n][e] : partial_scores[m][n + kScoreTokenGroups][e];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kExchanged; ++i) {
    const int m = i / (kScoreTokenGroups * 4), n = i / 4 % kScoreTokenGroups, e = i % 4;
    const float own =
        is_second ? partial_scores[m][n + kScoreTokenGroups][e] : partial_scores[m][n][e];
    scores[m][n][e] = own + received[i * kWarpLanes];
  }
}

// `tokens` is the tile of load `stage_idx`, the last one that has completed.
__device__ inline void qk_gemm(SharedMemoryPlan& smem, const unsigned char* tokens, int stage_idx,
                               Scores& scores) {
  PartialScores partial_scores;
  qk_gemm_dims(smem, tokens, partial_scores);
  if constexpr (kDimWarps > 1) {
    unsigned char* loading_stage = stage_of(smem, stage_idx + kStagesAhead);
    reduce_partial_scores(partial_scores, reinterpret_cast<float*>(loading_stage + kScratchOffset),
                          scores);
  } else {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = partial_scores[m][n][e];
      }
    }
  }
}
