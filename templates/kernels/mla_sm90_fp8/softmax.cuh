// Online softmax of the QK warpgroup, with a lazily updated row max and P in e4m3.

#pragma once

#include "common/fp8.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "ptx/mov.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/scores.cuh"
#include "softmax/work_rows.cuh"

// A word of P holds four of 16 tokens, in the order of the V fragments: 2c, 2c + 8, 2c + 1, 2c + 9
// with c = lane % 4.
constexpr int kTokenGroups = kBlockN / 16;
constexpr int kPWords = kTokenGroups * kScoreRows;
using Probabilities = u32[kPWords];

// Max offset: an update sets the row max this far below the maximum of the scores, in the log2
// domain. The next update is due when a score exceeds that maximum by more than 8.8 minus the
// offset. The smallest e4m3 is 2^-9, so probabilities below 2^-(9 + offset) of the largest are
// lost.
constexpr float kMaxOffset = 7.0f;

// An update costs time in the compute-bound regime, so a large `kBlockM` uses a smaller offset:
// more headroom for larger scores. The exception is a row whose maximum is an outlier: one of the
// four lanes that share the row, with a quarter of the KV block's tokens each, has no score within
// `kOutlierSpread` of it.
constexpr float kMaxOffsetWithHeadroom = kBlockM > 32 ? 3.0f : kMaxOffset;
constexpr float kOutlierSpread = 8.0f;

__device__ inline int score_row(int r) {
  return reload_warp() % 4 * kRowsPerWarp + reload_lane() / 4 + 8 * r;
}

// Sets the top bit of each byte of P that is the largest e4m3 (448, possibly saturated) or NaN.
__device__ inline u32 saturated_bytes(u32 word) { return (word + 0x02020202) & 0x80808080; }

// Row sums of the rounded probabilities of a KV block, so that l matches the weights of the PV
// GEMM. Sixteen of them are added in fp16. The sum of equal ones, and of one with zeros, is exact;
// otherwise each of four roundings has a relative error of at most 2^-12, of either sign.
struct ProbabilitySums {
  u32 pairs[kScoreRows];

  __device__ void add_word(const Probabilities& probabilities, int word) {
    const u32 four = probabilities[word];
    const u32 pair = add_f16x2(fp16x2_of_e4m3x2(four & 0xffff), fp16x2_of_high_e4m3x2(four));
    u32& sum = pairs[word % kScoreRows];
    sum = word < kScoreRows ? pair : add_f16x2(sum, pair);
    mov_b32(sum);  // keeps the addition here: compilers would sink it below the last word
  }

  __device__ float total(int r) const {
    return cvt_f32(Fp16{}, static_cast<u16>(pairs[r])) +
           cvt_f32(Fp16{}, static_cast<u16>(pairs[r] >> 16));
  }
};

// New row max of a row, from the maximum of this lane's scores.
__device__ inline float target_row_max(float maximum) {
  const float amax = quad_reduce_max(maximum);
  const bool is_outlier = !(amax - quad_reduce_min(maximum) < kOutlierSpread);
  return amax - (is_outlier ? kMaxOffset : kMaxOffsetWithHeadroom);
}

struct Softmax {
  float row_sum[kScoreRows];  // over this lane's tokens, of P as rounded
  float row_max[kScoreRows];  // stale maximum less its offset, log2 domain

  __device__ Softmax() {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      row_sum[r] = 0.0f;
      row_max[r] = -kFloatMax;
    }
  }

  // Fast path: a word of P from unscaled scores, with the stale row max and without a mask.
  __device__ void exp_word(const Scores& scores, float scale, Probabilities& probabilities,
                           int word) const {
    const int r = word % kScoreRows;
    probabilities[word] = exponentiate([&](int i) { return fmaf(scores[i], scale, -row_max[r]); },
                                       word / kScoreRows * 8 + r * 2);
  }

  // Returns whether the fast path holds for this warp; if not, update_row_max must follow.
  __device__ bool fast_path_holds(const Probabilities& probabilities, bool needs_mask) const {
    u32 saturated = 0;
#pragma unroll
    for (int word = 0; word < kPWords; ++word) saturated |= saturated_bytes(probabilities[word]);
    const bool is_large = fmaxf(fabsf(row_max[0]), fabsf(row_max[1])) > kLargeRowMax;
    return !__any_sync(~0u, saturated != 0 || is_large || needs_mask);
  }

  // Slow path: raises the row max to the target of the scores, here in the log2 domain, and
  // rescales the row sums. Scores and row max are rounded alike, so equal scores have equal
  // probabilities.
  __device__ void update_row_max(const Scores& scores, Probabilities& probabilities,
                                 float (&alpha)[kScoreRows]) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      const float target = target_row_max(max_score(scores, r));
      alpha[r] = raise_row_max(row_max[r], row_sum[r], target);
#pragma unroll
      for (int group = 0; group < kTokenGroups; ++group) {
        probabilities[group * 2 + r] =
            exponentiate([&](int i) { return scores[i] - row_max[r]; }, group * 8 + r * 2);
      }
    }
  }

  __device__ void add(const ProbabilitySums& sums) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) row_sum[r] += sums.total(r);
  }

  // A word of P from the differences of four scores to the row max; the first is score `i`.
  template <typename Difference>
  __device__ static u32 exponentiate(Difference difference, int i) {
    const u32 low = e4m3x2_of_f32(ex2_approx(difference(i + 4)), ex2_approx(difference(i)));
    const u32 high = e4m3x2_of_f32(ex2_approx(difference(i + 5)), ex2_approx(difference(i + 1)));
    return low | high << 16;
  }
};
