// Online softmax of one consumer over the blocks whose scores it has.

#pragma once

#include "accumulators.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ex2.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "softmax/row_reduce.cuh"
#include "softmax/row_state.cuh"

// So far from zero, rounding moves a score by as much as a probability may be off.
constexpr float kFarReference = 0x1p14f;  // log2 units

struct Softmax {
  float sum[kOwnRows];  // over this thread's tokens
  float reference[kOwnRows];  // log2 units

  // Scores, to be multiplied by `scale`, to probabilities, as if all rows saw all tokens and no
  // reference had to move; says whether that was so for this warp, by `hides` the former.
  __device__ bool take(const Scores& scores, float scale, Probabilities& probabilities,
                       bool hides) {
    float part[kOwnRows];
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      part[r] = exponentiate([&](int i) { return fmaf(scores[i], scale, -reference[r]); }, r,
                             probabilities);
    }
    const bool is_far = fmaxf(fabsf(reference[0]), fabsf(reference[1])) > kFarReference;
    if (__any_sync(~0u, fmaxf(part[0], part[1]) > kMostProbability || is_far || hides))
      return false;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) sum[r] += part[r];
    return true;
  }

  // Moves references first, to the maximum if that is larger; scores are in log2 units here. They
  // have been rounded as references were, so equal ones are equally far from a reference.
  __device__ void take_moving(const Scores& scores, Probabilities& probabilities,
                              float (&moved)[kOwnRows]) {
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      float maximum = -kInfinity;
#pragma unroll
      for (int i = 0; i < kBlockTokens / 8; ++i) {
        maximum = fmaxf(maximum, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
      }
      maximum = row_maximum(maximum);
      const float next = maximum > reference[r] ? maximum : reference[r];
      moved[r] = ex2_approx(reference[r] - next);
      reference[r] = next;
      sum[r] = sum[r] * moved[r] +
               exponentiate([&](int i) { return scores[i] - next; }, r, probabilities);
    }
  }

  // Leaves to the other consumer where references are and what they have moved by.
  __device__ void publish(const float (&moved)[kOwnRows], float* references,
                          float* rescales) const {
    const int thread = fresh_thread();
    const int row = row_of_thread(thread);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      if (thread % 4 != 0) continue;
      references[row + 8 * r] = reference[r];
      rescales[row + 8 * r] = moved[r];
    }
  }

  // Follows where the other consumer has moved references to; says whether any row of this warp
  // has.
  __device__ bool follow(const float* references, const float* rescales, float (&moved)[kOwnRows]) {
    bool moves = false;
    const int row = row_of_thread(fresh_thread());
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      moved[r] = rescales[row + 8 * r];
      moves |= moved[r] != 1.0f;
    }
    moves = __any_sync(~0u, moves);
    if (moves) {
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        sum[r] *= moved[r];
        reference[r] = references[row + 8 * r];
      }
    }
    return moves;
  }

  // Probabilities of row `r` by the distances of its scores from the reference; their sum.
  template <typename Distance>
  __device__ static float exponentiate(Distance distance, int r, Probabilities& probabilities) {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockTokens / 8; ++i) {
      const float low = ex2_approx(distance(i * 4 + r * 2));
      const float high = ex2_approx(distance(i * 4 + r * 2 + 1));
      part += low + high;
      probabilities[i * 2 + r] = cvt_rn_x2_f32(Element{}, high, low);
    }
    return part;
  }
};

// To log2 units, rounded as references are.
__device__ inline void scale_scores(Scores& scores, float scale) {
#pragma unroll
  for (int i = 0; i < kBlockTokens / 2; ++i) scores[i] = __fmul_rn(scores[i], scale);
}

// Hides what a row does not see: a select, for the hidden score may be NaN.
__device__ inline void hide(Scores& scores, const Item& item, int first_token) {
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const int visible = item.row_visible[own_row(r)] - first_token - lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlockTokens / 8; ++i) {
      if (i * 8 >= visible) scores[i * 4 + r * 2] = -kInfinity;
      if (i * 8 + 1 >= visible) scores[i * 4 + r * 2 + 1] = -kInfinity;
    }
  }
}
