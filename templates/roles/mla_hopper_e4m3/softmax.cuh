// Online softmax of the scorer. Needs multiply.cuh, ptx/ex2.cuh, blocks/e4m3.cuh.j2,
// blocks/row_reductions.cuh.

// A thread has two rows of the scores, g and g + 8 of its warp's with g = lane / 4; four lanes
// share a row. A word of probabilities holds four tokens of 16, in the order in which values come
// to lie in registers: 2c, 2c + 8, 2c + 1, 2c + 9 with c = lane % 4.
constexpr int kScoreRows = 2;
constexpr int kGroups = kBlockTokens / 16;
using Probabilities = u32[kGroups * kScoreRows];

// A reference is so far below the row's maximum when it moves, in log2 units: what is smaller than
// 2^-14 of the largest weight is lost, and a reference need not move before a score exceeds the
// maximum by 3.8.
constexpr float kReferenceLead = 5.0f;

// The largest e4m3. Eight probabilities together are asked for it, which costs less than each.
constexpr float kMostProbability8 = 448.0f;

// So far from zero, rounding moves a score by as much as a probability may be off.
constexpr float kFarReference = 0x1p14f;  // log2 units

__device__ inline int score_row(int r) {
  return fresh_warp() % 4 * kRowsOfWarp + fresh_lane() / 4 + 8 * r;
}

struct Softmax {
  float sum[kScoreRows];  // over this thread's tokens
  float reference[kScoreRows];  // log2 units

  // Scores, to be multiplied by `scale`, to probabilities, as if all rows saw all tokens and no
  // reference had to move; says whether that was so for this warp, by `hides` the former.
  __device__ bool take(const Scores& scores, float scale, Probabilities& probabilities,
                       bool hides) {
    float part[kScoreRows];
    float largest = 0.0f;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      part[r] = exponentiate([&](int i) { return fmaf(scores[i], scale, -reference[r]); }, r,
                             probabilities, largest);
    }
    const bool is_far = fmaxf(fabsf(reference[0]), fabsf(reference[1])) > kFarReference;
    if (__any_sync(~0u, largest > kMostProbability8 || is_far || hides)) return false;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) sum[r] += part[r];
    return true;
  }

  // Moves references first, if maxima are too large for them; scores are in log2 units here. They
  // have been rounded as references were, so equal ones are equally far from a reference.
  __device__ void take_moving(const Scores& scores, Probabilities& probabilities,
                              float (&moved)[kScoreRows]) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      float maximum = -kInfinity;
#pragma unroll
      for (int i = 0; i < kBlockTokens / 8; ++i) {
        maximum = fmaxf(maximum, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
      }
      const float wanted = row_maximum(maximum) - kReferenceLead;
      const float next = wanted > reference[r] ? wanted : reference[r];
      moved[r] = ex2_approx(reference[r] - next);
      reference[r] = next;
      float largest = 0.0f;
      sum[r] = sum[r] * moved[r] +
               exponentiate([&](int i) { return scores[i] - next; }, r, probabilities, largest);
    }
  }

  // Probabilities of row `r` by the distances of its scores from the reference; their sum.
  template <typename Distance>
  __device__ static float exponentiate(Distance distance, int r, Probabilities& probabilities,
                                       float& largest) {
    float halves[2] = {0.0f, 0.0f};
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int i = group * 8 + r * 2;
      const float a = ex2_approx(distance(i));
      const float b = ex2_approx(distance(i + 4));
      const float c = ex2_approx(distance(i + 1));
      const float d = ex2_approx(distance(i + 5));
      halves[group % 2] += (a + b) + (c + d);
      probabilities[group * 2 + r] = e4m3x2_of_f32(b, a) | e4m3x2_of_f32(d, c) << 16;
    }
    largest = fmaxf(largest, fmaxf(halves[0], halves[1]));
    return halves[0] + halves[1];
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
  for (int r = 0; r < kScoreRows; ++r) {
    const int visible = item.row_visible[score_row(r)] - first_token - lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlockTokens / 8; ++i) {
      if (i * 8 >= visible) scores[i * 4 + r * 2] = -kInfinity;
      if (i * 8 + 1 >= visible) scores[i * 4 + r * 2 + 1] = -kInfinity;
    }
  }
}
