// The scales of a block's tokens in shared memory.

#pragma once

#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"

// Values are multiplied as fp16, by scales in fp16. So that none is too large for that, they are in
// units of an item, a power of two: the largest scale is between 2^6 and 2^7 of them when one is
// chosen, and times 448 it is below 65504. What is below 2^-14 units loses bits: nothing of a token
// whose scale is 2^11 times smaller. The unit becomes larger when a block has a larger scale.
constexpr float kMaxScaled = 128.0f;
constexpr float kMaxValue = kMaxScaled * 448.0f;

// How many units are 1, before there is a scale: what any may exceed.
constexpr float kInitialSharedScale = 0x1p90f;

// How many are 1 so that the largest scale, which has that magnitude, is below kMaxScaled.
__device__ inline float shared_scale_for(float amax) {
  const u32 exponent = max(__float_as_uint(amax) >> 23, 43u);  // of 2^90 at the most
  return __uint_as_float((260 - exponent) << 23);
}

// The logarithm of a power of two.
__device__ inline float log2_of_pow2(float pow2) {
  return static_cast<float>(static_cast<int>(__float_as_uint(pow2) >> 23) - 127);
}

// For consumers, a warp of the scorer puts the scales of its sixteen tokens, as fp16, where their
// own were: group by group, for tokens 2c and 2c + 1 of either half of them a word beside each
// other.
__device__ constexpr int value_scale_index(int token, int group) {
  return token / kTokensPerWarp * (kTokensPerWarp * kScaleGroups * 2) + group * kTokensPerWarp +
         token % 8 / 2 * 4 + token % kTokensPerWarp / 8 * 2 + token % 2;
}

__device__ inline u16& value_scale(unsigned char* stage, int token, int group) {
  return reinterpret_cast<u16*>(stage + kScalesOffset)[value_scale_index(token, group)];
}

// A thread of the scorer, asked for its index once a block: that takes as long as a product.
struct QkThread {
  int lane;
  int warp;

  __device__ QkThread() {
    const int thread = reload_tid() % kQkThreads;
    lane = thread % kWarpLanes;
    warp = thread / kWarpLanes;
  }

  __device__ int token() const { return warp * kTokensPerWarp + lane / 4; }  // and that 8 further
};

// Of the tokens of a thread.
struct KeyScales {
  float of[2][kScaleGroups];

  __device__ KeyScales(const unsigned char* stage, const QkThread& qk_thread) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 found =
          reinterpret_cast<const float4*>(stage + kScalesOffset)[qk_thread.token() + half * 8];
      of[half][0] = found.x;
      of[half][1] = found.y;
      of[half][2] = found.z;
      of[half][3] = found.w;
    }
  }
};

// And those of the group lane % 4 alone, which this thread leaves for consumers.
struct ThreadScales {
  float of[2];

  __device__ void select(const KeyScales& scales, const QkThread& qk_thread) {
    const int group = qk_thread.lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = group % 2 == 0 ? scales.of[half][0] : scales.of[half][1];
      const float high = group % 2 == 0 ? scales.of[half][2] : scales.of[half][3];
      of[half] = group < 2 ? low : high;
    }
  }

  // Whether any is too large for its unit.
  __device__ bool exceeds_max_scaled(float shared_scale) const {
    return amax() * shared_scale >= kMaxScaled;
  }

  // The largest finite magnitude.
  __device__ float amax() const {
    const float a = fabsf(of[0]);
    const float b = fabsf(of[1]);
    return fmaxf(a <= kFloatMax ? a : 0.0f, b <= kFloatMax ? b : 0.0f);
  }

  // All lanes have read theirs.
  __device__ void store(unsigned char* stage, const QkThread& qk_thread, float shared_scale) const {
    u16* first = &value_scale(stage, qk_thread.token(), qk_thread.lane % 4);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[value_scale_index(half * 8, 0)] =
          static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, of[half] * shared_scale));
    }
  }
};
static_assert(kTokensPerWarp == 16, "a thread has two tokens of a warp's");
static_assert(kScaleGroups == 4, "a thread leaves the scales of one group");
