// Online softmax over the KV blocks of one CTA.

#pragma once

#include "common/mma_fragments.cuh"
#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma.cuh"
#include "ptx/arithmetic.cuh"
#include "softmax/online_softmax.cuh"
#include "work_item.cuh"

// Row sums cover this thread's tokens only, of P as rounded for the PV GEMM. The row max, base 2,
// is in shared memory.
struct Softmax {
  const Params& params;
  float scale;  // of the scores, times log2(e)
  float row_sum[kScoreRowGroups][2];
  float block_row_sum[kScoreRowGroups][2];

  __device__ explicit Softmax(const Params& params)
      : params(params), scale(score_scale(params) * kLog2E) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[m][half] = 0.0f;
    }
  }

  // Base-2 score. Rounded on its own, never fused with a subtraction: the ballot on whether it
  // exceeds the row max and the row max updated to it must use the same number.
  __device__ float scaled(float score) const { return __fmul_rn(score, scale); }

  // KV limit of a row within the KV block; more than kBlockN means all.
  __device__ static int kv_end_of_row(int row, int first_token, const SharedMemoryPlan& smem) {
    // Padding has no bias to read.
    const bool is_unmasked = !kHasBias && first_token + kBlockN <= smem.work.unmasked_kv_end;
    return is_unmasked ? kBlockN : smem.row_kv_end[row] - first_token;
  }

  // Writes P of a KV block relative to the current row max. Returns whether a score exceeds it by
  // more than the rescale threshold, as the first score of a row always does; P is invalid then.
  __device__ bool write_probabilities(const Scores& scores, int first_token,
                                      SharedMemoryPlan& smem) {
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = score_row(m, half);
        const int col_limit = kv_end_of_row(row, first_token, smem);
        const float row_max = smem.row_max[row];
        const float* bias = row_bias(params, smem.work, row);
        block_row_sum[m][half] = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
          float p[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int token = score_token(n, i);
            float score = scaled(scores[m][n][half * 2 + i]);
            const bool attends =
                token < col_limit && attends_token(bias, first_token, token, score, smem);
            // A select, not arithmetic: the masked score may be NaN.
            const float relative = attends ? score - row_max : -kInfinity;
            exceeds |= relative > kRescaleThreshold;
            p[i] = ex2_approx(relative);
          }
          const u32 packed = round_pair(p[0], p[1], block_row_sum[m][half]);
          const int first = score_token(n, 0);
          const u32 offset = swizzled_offset<kProbabilityBytes>(row, first / kChunkElements) +
                             first % kChunkElements * 2;
          *reinterpret_cast<u32*>(smem.probabilities + offset) = packed;
        }
      }
    }
    return exceeds;
  }

  // Updates the row max of every row whose max over all token warps exceeds the threshold, computes
  // the rescale factor alpha of O, and writes P again.
  __device__ void update_row_max(const Scores& scores, int first_token, SharedMemoryPlan& smem) {
    write_maxima(scores, first_token, smem);
    __syncthreads();
    for (int row = static_cast<int>(threadIdx.x); row < kBlockM; row += kThreads) {
      float maximum = -kInfinity;
#pragma unroll
      for (int warp = 0; warp < kTokenWarps; ++warp) {
        maximum = fmaxf(maximum, smem.row_partial[warp][row]);
      }
      const float row_max = smem.row_max[row];
      const bool exceeds = maximum - row_max > kRescaleThreshold;
      smem.row_alpha[row] = exceeds ? ex2_approx(row_max - maximum) : 1.0f;
      if (exceeds) smem.row_max[row] = maximum;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] *= smem.row_alpha[score_row(m, half)];
      }
    }
    write_probabilities(scores, first_token, smem);
    __syncthreads();
  }

  // Publishes the max of every row of the KV block over this warp's tokens.
  __device__ void write_maxima(const Scores& scores, int first_token,
                               SharedMemoryPlan& smem) const {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = score_row(m, half);
        const int col_limit = kv_end_of_row(row, first_token, smem);
        const float* bias = row_bias(params, smem.work, row);
        float maximum = -kInfinity;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int token = score_token(n, i);
            float score = scaled(scores[m][n][half * 2 + i]);
            if (token < col_limit && attends_token(bias, first_token, token, score, smem)) {
              maximum = fmaxf(maximum, score);
            }
          }
        }
        maximum = quad_reduce_max(maximum);
        if (lane_index() % 4 == 0) smem.row_partial[token_warp()][row] = maximum;
      }
    }
  }

  __device__ void add_block_row_sum() {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[m][half] += block_row_sum[m][half];
    }
  }

  // Publishes the partial sums of each row to all warps.
  __device__ void publish(SharedMemoryPlan& smem) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] = quad_reduce_sum(row_sum[m][half]);
        if (lane_index() % 4 == 0) {
          smem.row_partial[token_warp()][score_row(m, half)] = row_sum[m][half];
        }
      }
    }
  }
};
