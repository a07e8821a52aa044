// Softmax over the tokens of one warp, whose references are its own.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "load_q.cuh"
#include "mma.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ex2.cuh"
#include "ptx/movmatrix.cuh"
#include "shared_memory.cuh"
#include "tile_scheduler.cuh"

// A row's probabilities are relative to its reference. No maximum is asked for while no score
// exceeds it by more than this in log2 units, so that references move seldom.
constexpr float kReferenceSlack = 8.0f;

// Sums are over this lane's tokens only.
struct Softmax {
  float reference[kRowGroups][2];  // log2 units
  float sum[kRowGroups][2];

  __device__ Softmax() {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        reference[n][r] = -kLargest;
        sum[n][r] = 0.0f;
      }
    }
  }

  // Turns scores in log2 units into probabilities, and adds them up.
  __device__ void update(Scores& scores, Output& output) {
    if (__any_sync(~0u, exceeds(scores))) move_references(scores, output);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = scores[step][n][e];
          score = ex2_approx(score - reference[n][e % 2]);
          sum[n][e % 2] += score;
        }
      }
    }
  }

  // Whether a score exceeds its reference by too much, as any does that is the first of its row.
  __device__ bool exceeds(const Scores& scores) const {
    float largest = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          largest = fmaxf(largest, scores[step][n][e] - reference[n][e % 2]);
        }
      }
    }
    return largest > kReferenceSlack;
  }

  // Moves the reference of every row to its maximum, if that is larger.
  __device__ void move_references(const Scores& scores, Output& output) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float maximum = -kInfinity;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          maximum = fmaxf(maximum, fmaxf(scores[step][n][r], scores[step][n][2 + r]));
        }
#pragma unroll
        for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
          maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
        }
        const float next = fmaxf(maximum, reference[n][r]);
        const float moved = ex2_approx(reference[n][r] - next);
        reference[n][r] = next;
        sum[n][r] *= moved;
#pragma unroll
        for (int tile = 0; tile < kDimTiles; ++tile) {
          output[tile][n][r] *= moved;
          output[tile][n][2 + r] *= moved;
        }
      }
    }
  }

  // Leaves this warp's rows of a group in shared memory.
  __device__ void publish(int group, RowState (&states)[8]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[group][r];
#pragma unroll
      for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
        total += __shfl_xor_sync(~0u, total, lanes);
      }
      if (lane_index() < 4) states[own_row(0, r)] = {reference[group][r], total};
    }
  }
};

// What scores are multiplied by, in log2 units.
struct ScoreFactors {
  float each[kScalesQuery ? kRowGroups : 1][2];

  __device__ ScoreFactors(const Query& query, float factor) {
#pragma unroll
    for (int n = 0; n < (kScalesQuery ? kRowGroups : 1); ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) each[n][r] = factor * query.undone_of(n, r);
    }
  }

  __device__ float of(int group, int r) const { return kScalesQuery ? each[group][r] : each[0][0]; }
};

__device__ inline void scale_scores(const ScoreFactors& factors, Scores& scores) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Rounded, never fused: equal scores must have equal distances from a reference.
        scores[step][n][e] = __fmul_rn(scores[step][n][e], factors.of(n, e % 2));
      }
    }
  }
}

// Hides what a draft mask does.
__device__ inline void hide_by_mask(const Params& params, const Item& item, int first_token,
                                    Scores& scores) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = own_row(n, e % 2);
      if (row >= item.rows) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int token = first_token + own_token(step, e / 2);
        if (!item.is_shown(params, row, token)) scores[step][n][e] = -kInfinity;
      }
    }
  }
}

// Hides what rows do not see: a select, for the hidden score may be NaN.
__device__ inline void hide_scores(const Params& params, const Item& item, int first_token,
                                   Scores& scores) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Sight sight = item.sight_of(params, own_row(n, r));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = first_token + own_token(step, half);
          if (!sight.has(token)) scores[step][n][half * 2 + r] = -kInfinity;
        }
      }
    }
  }
  if (params.draft_mask != nullptr) hide_by_mask(params, item, first_token, scores);
}

// Probabilities as the next product takes them: tokens along its depth, rows as columns.
__device__ inline void turn_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* of = scores[step][n] + half * 2;
        probabilities[step][n][half] = movmatrix_trans(cvt_rn_x2_f32(Element{}, of[1], of[0]));
      }
    }
  }
}
