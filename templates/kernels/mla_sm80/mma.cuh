// MMAs of one KV block: S = Q K^T, and O += P V.

#pragma once

#include "common/mma_fragments.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/warp_matrix.cuh"
#include "work_item.cuh"

// S fragment of one warp, as mma lays it out: element [m][n][e] belongs to
// row score_row(m, e / 2) and token score_token(n, e % 2) of the KV block.
using Scores = float[kScoreRowGroups][kScoreTokenGroups][4];

// kDimWarps adjacent token warps cooperate: each takes the tokens of all of them and a part of the
// dims, which reads shared memory less often than a narrow MMA over all dims.
constexpr int kGemmTokenGroups = kScoreTokenGroups * kDimWarps;
using PartialScores = float[kScoreRowGroups][kGemmTokenGroups][4];

// Steps of 16 dims whose K fragments are loaded together.
constexpr int kKeySteps = kGemmTokenGroups % 2 == 0 ? 1 : 2;

__device__ inline int token_warp() { return warp_index() % kTokenWarps; }
__device__ inline int dim_warp() { return warp_index() % kDimWarps; }

__device__ inline int score_row(int group, int half) {
  const int row_warp = warp_index() / kTokenWarps;
  return fragment_row(row_warp * kScoreRowGroups + group, half);
}

__device__ inline int score_token(int group, int i) {
  return fragment_col(token_warp() * kScoreTokenGroups + group, i);
}

// MMAs over this warp's dims: of every 64, the 32 or 64 that belong to it.
__device__ inline void qk_gemm_dims(const SharedMemoryPlan& smem, const unsigned char* tokens,
                                    PartialScores& partial_scores) {
  const int lane = lane_index();
  const u32 query = shared_address(smem.query);
  const u32 keys = shared_address(tokens);
  const int query_row = warp_index() / kTokenWarps * kScoreRowGroups * 16 + lane % 16;
  const int key_row = token_warp() / kDimWarps * kGemmTokenGroups * 8 + lane % 8;

  clear_fragments(partial_scores);
  // Not unrolled: the addresses of all steps at once would spill.
#pragma unroll 1
  for (int column = 0; column < kTokenBytes; column += 128) {
#pragma unroll
    for (int step = 0; step < 4 / kDimWarps; step += kKeySteps) {
      const int first_chunk = dim_warp() * 4 + step * 2;
      // One ldmatrix loads two fragments: of two token groups, or of two steps of a single one.
      u32 k[kGemmTokenGroups * kKeySteps / 2][4];
#pragma unroll
      for (int load = 0; load < kGemmTokenGroups * kKeySteps / 2; ++load) {
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
          for (int n = 0; n < kGemmTokenGroups; ++n) {
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

// `tokens` is the KV block of load `stage_idx`, the last one that has completed.
__device__ inline void qk_gemm(SharedMemoryPlan& smem, const unsigned char* tokens, int stage_idx,
                               Scores& scores) {
  PartialScores partial_scores;
  qk_gemm_dims(smem, tokens, partial_scores);
  if constexpr (kDimWarps > 1) {
    unsigned char* loading_stage = stage_ptr(smem, stage_idx + kStagesAhead);
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

// O fragment of one warp: element [m][n][e] belongs to row fragment_row(m, e / 2) and output dim
// output_dim(n, e % 2).
using Output = float[kRowGroups][kWarpDims / 8][4];

__device__ inline int output_dim(int group, int i) {
  return warp_index() * kWarpDims + fragment_col(group, i);
}

__device__ inline void rescale_output(const SharedMemoryPlan& smem, Output& output) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
    const float low = smem.row_alpha[fragment_row(m, 0)];
    const float high = smem.row_alpha[fragment_row(m, 1)];
    rescale_row(output[m], 0, low);
    rescale_row(output[m], 1, high);
  }
}

// Whether a row attends to a token that some rows mask.
__device__ inline bool attends(const Params& params, const SharedMemoryPlan& smem, int row,
                               int first_token, int token) {
  if (first_token + token >= smem.row_kv_end[row]) return false;
  if constexpr (kHasBias) {
    return row_bias(params, smem.work, row)[first_token + token] != -kInfinity;
  }
  return true;
}

// Whether some row masks a token of [first, last).
__device__ inline bool is_at_boundary(const SharedMemoryPlan& smem, int first_token, int token) {
  if constexpr (kHasBias) {
    return smem.is_masked[token] != 0 || first_token + token >= smem.work.unmasked_kv_end;
  }
  return true;
}

// Adds the tokens [first, last) of the KV block, masked for some rows only, to the rows that attend
// to them, and zeroes their V: 0 x NaN is NaN, so a masked V must not reach the tensor core.
__device__ inline void pv_gemm_boundary(const Params& params, SharedMemoryPlan& smem,
                                        unsigned char* values, int first_token, int first, int last,
                                        Output& output) {
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int token = first; token < last; ++token) {
    if (!is_at_boundary(smem, first_token, token)) continue;
    float p[kRowGroups][2];
    u32 attending_rows = 0;  // a bit for each row of this thread
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = fragment_row(m, half);
        const u32 offset = swizzled_offset<kProbabilityBytes>(row, token / kChunkElements) +
                           token % kChunkElements * 2;
        p[m][half] = cvt_f32(Element{}, *reinterpret_cast<u16*>(smem.probabilities + offset));
        if (attends(params, smem, row, first_token, token)) attending_rows |= 1u << (m * 2 + half);
      }
    }
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; ++n) {
      const int dim = output_dim(n, 0);
      const u32 offset =
          swizzled_offset<kTokenBytes>(token, dim / kChunkElements) + dim % kChunkElements * 2;
      const u32 pair = *reinterpret_cast<u32*>(values + offset);
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if ((attending_rows >> (m * 2 + half) & 1) == 0) continue;
          add_weighted_pair(output[m][n], half, p[m][half], pair);
        }
      }
    }
  }
  __syncthreads();
  for (int word = first * kTokenBytes / 4 + static_cast<int>(threadIdx.x);
       word < last * kTokenBytes / 4; word += kThreads) {
    if (!is_at_boundary(smem, first_token, word / (kTokenBytes / 4))) continue;
    reinterpret_cast<u32*>(values)[word] = 0;
  }
  __syncthreads();
}

__device__ inline void pv_gemm(const SharedMemoryPlan& smem, const unsigned char* tokens,
                               Output& output) {
  const int lane = lane_index();
  const u32 probabilities = shared_address(smem.probabilities);
  const u32 values = shared_address(tokens);
#pragma unroll
  for (int token = 0; token < kBlockN; token += 16) {
    u32 p[kRowGroups][4];
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
      const int chunk = token / kChunkElements + lane / 16;
      ldmatrix_x4(p[m],
                  probabilities + swizzled_offset<kProbabilityBytes>(m * 16 + lane % 16, chunk));
    }
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; n += 2) {
      u32 v[4];
      const int chunk = (warp_index() * kWarpDims + n * 8) / kChunkElements + lane / 16;
      ldmatrix_x4_trans(v, values + swizzled_offset<kTokenBytes>(token + lane % 16, chunk));
      mma_columns(output, n, p, v);
    }
  }
}
