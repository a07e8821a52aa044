// Scales of the tokens of a warp: those of K multiply scores, and those of V multiply P.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "softmax/value_scaling.cuh"
#include "work_item.cuh"

__device__ inline void multiply_output(Output& output, float factor) {
#pragma unroll
  for (int tile = 0; tile < kPartDimTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[tile][n][e] *= factor;
    }
  }
}

// Scales of the tokens of a lane's accumulators.
struct TokenScales {
  float tokens[kSteps][2];

  // Of a tile of K or V, which has arrived.
  template <typename Rows>
  __device__ TokenScales(const Rows& rows, const unsigned char* tile, int warp) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 offset;
        if constexpr (kHasUnalignedRows) {
          offset = rows.scale_offset(step, half);
        } else {
          offset = scale_row_offset(warp, token_of_lane(step, half));
        }
        tokens[step][half] = *reinterpret_cast<const float*>(tile + offset);
      }
    }
  }

  __device__ void multiply(Scores& scores) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[step][n][e] *= tokens[step][e / 2];
      }
    }
  }

  // Clears scales of V like clear_masked its elements, and returns the same.
  __device__ bool clear_masked(const WorkItem& work, int first_token) {
    const KvRange unmasked = {work.unmasked_kv_begin, work.unmasked_kv_end};
    const KvRange attended = {work.kv_begin, work.kv_end};
    bool has_nonfinite = false;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = first_token + token_of_lane(step, half);
        if (unmasked.contains(token)) continue;
        float& scale = tokens[step][half];
        const bool is_attended = attended.contains(token);
        const bool is_finite = fabsf(scale) < kInfinity;
        has_nonfinite |= is_attended && !is_finite;
        if (!is_attended || !is_finite) scale = 0.0f;
      }
    }
    return __any_sync(~0u, has_nonfinite);
  }

  // Scales the scales of V for P, and O if the scaling moves.
  __device__ void scale_values(ValueScaling& scaling, Output& output) {
    float magnitude = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        magnitude = fmaxf(magnitude, ValueScaling::magnitude_of(tokens[step][half]));
      }
    }
    if (__any_sync(~0u, scaling.exceeds(magnitude))) {
#pragma unroll
      for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
        magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, lanes));
      }
      multiply_output(output, scaling.move(magnitude));
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) tokens[step][half] = scaling.scaled(tokens[step][half]);
    }
  }

  // A word that depends on all scales, for arrive_after_reads.
  __device__ u32 word() const {
    u32 word = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      word ^= __float_as_uint(tokens[step][0]) ^ __float_as_uint(tokens[step][1]);
    }
    return word;
  }
};
