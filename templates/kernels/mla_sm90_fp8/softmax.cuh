// Online softmax of the scorer.

#pragma once

#include "common/fp8.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma_operands.cuh"
#include "ptx/add.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ex2.cuh"
#include "ptx/mov.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "softmax/row_reduce.cuh"

// A thread has two rows of the scores, g and g + 8 of its warp's with g = lane / 4; four lanes
// share a row. A word of probabilities holds four tokens of 16, in the order in which values come
// to lie in registers: 2c, 2c + 8, 2c + 1, 2c + 9 with c = lane % 4.
constexpr int kScoreRows = 2;
constexpr int kTokenGroups = kBlockN / 16;
constexpr int kWords = kTokenGroups * kScoreRows;
using Probabilities = u32[kWords];

// A reference is so far below the row's maximum when it moves, in log2 units. It need not move
// again before a score exceeds that maximum by 8.8 less so much; what is smaller than 2^-9 of the
// largest weight, by a factor of 2 for each of these units, is lost.
constexpr float kRowMaxLead = 7.0f;

// Moving takes time where memory is not the limit. There is room for larger scores to come then,
// but where the maximum is an outlier: where one of the four lanes that have a row, each a quarter
// of a block's tokens, has no score that is so near.
constexpr float kRowMaxLeadWithHeadroom = kBlockM > 32 ? 3.0f : kRowMaxLead;
constexpr float kOutlierSpread = 8.0f;

// So far from zero, rounding moves a score by as much as a probability may be off.
constexpr float kLargeRowMax = 0x1p14f;  // log2 units

__device__ inline int score_row(int r) {
  return reload_warp() % 4 * kRowsPerWarp + reload_lane() / 4 + 8 * r;
}

// Whether one of four probabilities is the largest e4m3, so that it may have been larger, or a NaN.
__device__ inline u32 is_max_bytes(u32 word) { return (word + 0x02020202) & 0x80808080; }

// Adds up the probabilities of a block as they have been rounded, so that rounding a large one
// changes nothing. Sixteen are added in fp16: of equal ones, and of one with zeros, the sum is
// exact, and of others each of four roundings changes it by 2^-12 at the most, this way or that.
struct ProbabilitySums {
  u32 pairs[kScoreRows];

  __device__ void add_word(const Probabilities& probabilities, int word) {
    const u32 four = probabilities[word];
    const u32 pair = add_f16x2(fp16x2_of_e4m3x2(four & 0xffff), fp16x2_of_high_e4m3x2(four));
    u32& own = pairs[word % kScoreRows];
    own = word < kScoreRows ? pair : add_f16x2(own, pair);
    mov_b32(own);  // added here, not when all words are
  }

  __device__ float total(int r) const {
    return cvt_f32(Fp16{}, static_cast<u16>(pairs[r])) +
           cvt_f32(Fp16{}, static_cast<u16>(pairs[r] >> 16));
  }
};

// Where a row's reference is to be, by the maximum of this lane's scores.
__device__ inline float target_row_max(float maximum) {
  const float amax = quad_reduce_max(maximum);
  const bool is_outlier = !(amax - quad_reduce_min(maximum) < kOutlierSpread);
  return amax - (is_outlier ? kRowMaxLead : kRowMaxLeadWithHeadroom);
}

struct Softmax {
  float row_sum[kScoreRows];  // of this lane's probabilities, as they are multiplied
  float row_max[kScoreRows];  // log2 units

  __device__ Softmax() {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      row_sum[r] = 0.0f;
      row_max[r] = -kFloatMax;
    }
  }

  // One word of probabilities, of scores to be multiplied by `scale`, as if all rows saw all tokens
  // and no reference had to move.
  __device__ void exp_word(const Scores& scores, float scale, Probabilities& probabilities,
                           int word) const {
    const int r = word % kScoreRows;
    probabilities[word] = exponentiate([&](int i) { return fmaf(scores[i], scale, -row_max[r]); },
                                       word / kScoreRows * 8 + r * 2);
  }

  // Says whether that was so for this warp, by `needs_mask` the former.
  __device__ bool fits(const Probabilities& probabilities, bool needs_mask) const {
    u32 amax = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) amax |= is_max_bytes(probabilities[word]);
    const bool is_far = fmaxf(fabsf(row_max[0]), fabsf(row_max[1])) > kLargeRowMax;
    return !__any_sync(~0u, amax != 0 || is_far || needs_mask);
  }

  // Moves references first, if maxima are too large for them; scores are in log2 units here. They
  // have been rounded as references were, so equal ones are equally far from a reference.
  __device__ void update_row_max(const Scores& scores, Probabilities& probabilities,
                                 float (&alpha)[kScoreRows]) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      float maximum = -kInfinity;
#pragma unroll
      for (int i = 0; i < kBlockN / 8; ++i) {
        maximum = fmaxf(maximum, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
      }
      const float target = target_row_max(maximum);
      const float next = target > row_max[r] ? target : row_max[r];
      alpha[r] = ex2_approx(row_max[r] - next);
      row_max[r] = next;
      row_sum[r] *= alpha[r];
#pragma unroll
      for (int group = 0; group < kTokenGroups; ++group) {
        probabilities[group * 2 + r] =
            exponentiate([&](int i) { return scores[i] - next; }, group * 8 + r * 2);
      }
    }
  }

  __device__ void add(const ProbabilitySums& sums) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) row_sum[r] += sums.total(r);
  }

  // Four probabilities by the distances of their scores from the reference, of which the first is
  // number `i`.
  template <typename Distance>
  __device__ static u32 exponentiate(Distance distance, int i) {
    const u32 low = e4m3x2_of_f32(ex2_approx(distance(i + 4)), ex2_approx(distance(i)));
    const u32 high = e4m3x2_of_f32(ex2_approx(distance(i + 5)), ex2_approx(distance(i + 1)));
    return low | high << 16;
  }
};

// To log2 units, rounded as references are.
__device__ inline void scale_scores(Scores& scores, float scale) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) scores[i] = __fmul_rn(scores[i], scale);
}

// Hides what a row does not see: a select, for the hidden score may be NaN.
__device__ inline void mask_scores(Scores& scores, const WorkItem& work, int first_token) {
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) {
    const int col_limit = work.row_kv_end[score_row(r)] - first_token - lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      if (i * 8 >= col_limit) scores[i * 4 + r * 2] = -kInfinity;
      if (i * 8 + 1 >= col_limit) scores[i * 4 + r * 2 + 1] = -kInfinity;
    }
  }
}
