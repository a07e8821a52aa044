// Online softmax of one consumer over the blocks whose scores it has. Needs accumulators.cuh,
// ptx/ex2.cuh, ptx/cvt.cuh, ptx/stmatrix.cuh, blocks/row_reductions.cuh.

struct Softmax {
  float sum[kOwnRows];  // over this thread's tokens
  float reference[kOwnRows];  // log2 units

  // Scores to probabilities, which multiply by `factor` first; says whether references of this
  // warp have moved, and leaves them, and what they have moved by, to the other consumer.
  __device__ bool take(const Scores& scores, float factor, Probabilities& probabilities,
                       float (&moved)[kOwnRows], float* references, float* rescales) {
    float part[kOwnRows];
    const int thread = fresh_thread();
    references += row_of_thread(thread);
    rescales += row_of_thread(thread);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      part[r] = exponentiate(scores, factor, r, probabilities);
      moved[r] = 1.0f;
    }
    const bool moves = __any_sync(~0u, fmaxf(part[0], part[1]) > kMostProbability);
    if (moves) {
#pragma unroll
      for (int r = 0; r < kOwnRows; ++r) {
        float maximum = -kInfinity;
#pragma unroll
        for (int i = 0; i < kBlockTokens / 8; ++i) {
          maximum = fmaxf(maximum, __fmul_rn(scores[i * 4 + r * 2], factor));
          maximum = fmaxf(maximum, __fmul_rn(scores[i * 4 + r * 2 + 1], factor));
        }
        maximum = row_maximum(maximum);
        const float next = maximum > reference[r] ? maximum : reference[r];
        moved[r] = ex2_approx(reference[r] - next);
        reference[r] = next;
        part[r] = exponentiate(scores, factor, r, probabilities);
        sum[r] *= moved[r];
        if (thread % 4 == 0) references[8 * r] = next;
      }
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      sum[r] += part[r];
      if (thread % 4 == 0) rescales[8 * r] = moved[r];
    }
    return moves;
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
        if (moved[r] != 1.0f) reference[r] = references[row + 8 * r];
      }
    }
    return moves;
  }

  __device__ float exponentiate(const Scores& scores, float factor, int r,
                                Probabilities& probabilities) const {
    float part = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockTokens / 8; ++i) {
      // Rounded, never fused: equal scores must have equal distances from a reference.
      const float low = ex2_approx(__fmul_rn(scores[i * 4 + r * 2], factor) - reference[r]);
      const float high = ex2_approx(__fmul_rn(scores[i * 4 + r * 2 + 1], factor) - reference[r]);
      part += low + high;
      probabilities[i * 2 + r] = cvt_rn_x2_f32(Element{}, high, low);
    }
    return part;
  }
};

// Hides, in log2 units, what a row does not see: a select, for the hidden score may be NaN.
__device__ inline void hide(Scores& scores, float factor, const Item& item, int first_token) {
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const int visible = item.row_visible[own_row(r)] - first_token - lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlockTokens / 8; ++i) {
      float& low = scores[i * 4 + r * 2];
      float& high = scores[i * 4 + r * 2 + 1];
      low = i * 8 < visible ? __fmul_rn(low, factor) : -kInfinity;
      high = i * 8 + 1 < visible ? __fmul_rn(high, factor) : -kInfinity;
    }
  }
}
