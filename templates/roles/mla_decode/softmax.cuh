// Online softmax over the tiles of one block. Needs Scores, SharedMemory, ptx/ex2.cuh, ptx/cvt.cuh.

// A reference is kept until a score exceeds it by this much, in log2 units: the output is rescaled
// seldom, and no probability exceeds 2^8, which fp16 holds.
constexpr float kReferenceSlack = 8.0f;

// Running statistics of the rows whose scores this thread holds. `reference` is of the row, in log2
// units, within kReferenceSlack of its maximum; `sum` is over this thread's tokens only, of
// probabilities relative to the reference.
struct Softmax {
  float scale;  // bmm1_scale * log2(e)
  float reference[kScoreRowGroups][2];
  float sum[kScoreRowGroups][2];

  __device__ explicit Softmax(float bmm1_scale) : scale(bmm1_scale * kLog2E) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -kInfinity;
        sum[m][half] = 0.0f;
      }
    }
  }

  // Scales the scores of a tile to log2 units and hides what a row may not see.
  __device__ void mask(Scores& scores, int first_token, const Work& work,
                       const SharedMemory& shared) const {
    const bool is_visible_to_all = first_token + kTileTokens <= work.visible_to_all;
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int visible = is_visible_to_all
                                ? kTileTokens
                                : shared.row_visible[score_row(m, half)] - first_token;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            float& score = scores[m][n][half * 2 + parity];
            // A select, not arithmetic: the hidden score may be NaN.
            score = score_token(n, parity) < visible ? score * scale : -kInfinity;
          }
        }
      }
    }
  }

  // Finds the maximum of every row of the tile in this warp, for update to compare over warps.
  __device__ static void find_maximum(const Scores& scores, SharedMemory& shared) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = -kInfinity;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
          maximum = fmaxf(maximum, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
        if (lane_index() % 4 == 0) shared.row_partial[token_warp()][score_row(m, half)] = maximum;
      }
    }
  }

  __device__ static float row_maximum(const SharedMemory& shared, int row) {
    float maximum = shared.row_partial[0][row];
#pragma unroll
    for (int warp = 1; warp < kTokenWarps; ++warp) {
      maximum = fmaxf(maximum, shared.row_partial[warp][row]);
    }
    return maximum;
  }

  // Turns the scores into probabilities in shared memory. Returns whether a row's reference moved,
  // and with it what the output so far must be multiplied by. The sum is of the probabilities as
  // P V uses them, that is rounded.
  __device__ bool update(const Scores& scores, SharedMemory& shared) {
    bool has_moved = false;
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = score_row(m, half);
        const float maximum = row_maximum(shared, row);
        const float before = reference[m][half];
        if (maximum > before + kReferenceSlack) {
          reference[m][half] = maximum;
          has_moved = true;
        }
        // A row that has seen nothing has no reference yet: its probabilities are 2^-inf.
        const float base = reference[m][half] == -kInfinity ? 0.0f : reference[m][half];
        const float rescale = ex2_approx(before - base);
        sum[m][half] *= rescale;
        if (token_warp() == 0 && lane_index() % 4 == 0) shared.row_rescale[row] = rescale;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
          const u32 packed = cvt_rn_x2_f32(Element{}, ex2_approx(scores[m][n][half * 2 + 1] - base),
                                           ex2_approx(scores[m][n][half * 2] - base));
          sum[m][half] += cvt_f32(Element{}, static_cast<u16>(packed)) +
                          cvt_f32(Element{}, static_cast<u16>(packed >> 16));
          const int token = score_token(n, 0);
          const u32 offset = swizzled_offset<kProbabilityBytes>(row, token / kChunkElements) +
                             token % kChunkElements * 2;
          *reinterpret_cast<u32*>(shared.probabilities + offset) = packed;
        }
      }
    }
    return has_moved;
  }

  // Leaves each row's reference and the parts of its sum in shared memory, for every warp to read.
  __device__ void publish(SharedMemory& shared) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[m][half] += __shfl_xor_sync(~0u, sum[m][half], 1);
        sum[m][half] += __shfl_xor_sync(~0u, sum[m][half], 2);
        if (lane_index() % 4 == 0) {
          const int row = score_row(m, half);
          shared.row_partial[token_warp()][row] = sum[m][half];
          if (token_warp() == 0) shared.row_reference[row] = reference[m][half];
        }
      }
    }
  }
};
