// V scales of a KV block: fp16 with a shared scale, in the place of the stored scales.

#pragma once

#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"

// V is dequantized to fp16 by scales in fp16. A shared scale, a power of two per work item, keeps
// them in range: the largest V scale times the shared scale is between 2^6 and 2^7 when the shared
// scale is chosen, and times 448 it is below 65504. Scaled V below 2^-14 loses bits (subnormal
// fp16): a token loses none if its scale is at least 2^-11 of the largest. The shared scale shrinks
// when a KV block has a larger scale.
constexpr float kMaxScaled = 128.0f;
constexpr float kMaxV = kMaxScaled * 448.0f;

// Shared scale before the first KV block; almost any V scale exceeds the limit with it.
constexpr float kInitialSharedScale = 0x1p90f;

// The shared scale that scales `amax`, the largest V scale, to less than kMaxScaled.
__device__ inline float shared_scale_for(float amax) {
  const u32 exponent = max(__float_as_uint(amax) >> 23, 43u);  // a shared scale of at most 2^90
  return __uint_as_float((260 - exponent) << 23);
}

__device__ inline float log2_of_pow2(float pow2) {
  return static_cast<float>(static_cast<int>(__float_as_uint(pow2) >> 23) - 127);
}

// V scales overwrite the stored scales in place: each QK warp stores those of its 16 tokens as fp16
// for the PV warpgroups. The order is by scale group; within it, tokens 2c, 2c + 1, 2c + 8 and
// 2c + 9 are adjacent, as the V fragments of a lane need them.
__device__ constexpr int v_scale_index(int token, int group) {
  return token / kTokensPerQkWarp * (kTokensPerQkWarp * kTokenScaleBytes / 2) +
         group * kTokensPerQkWarp + token % 8 / 2 * 4 + token % kTokensPerQkWarp / 8 * 2 +
         token % 2;
}

__device__ inline u16* v_scales_of(unsigned char* stage) {
  return reinterpret_cast<u16*>(stage + kScalesOffset);
}

__device__ inline u16& v_scale(unsigned char* stage, int token, int group) {
  return v_scales_of(stage)[v_scale_index(token, group)];
}

// Lane and warp of a QK thread, read once per KV block: reading %tid takes as long as an MMA.
struct QkThread {
  int lane;
  int warp;

  __device__ QkThread() {
    const int thread = reload_tid() % kQkThreads;
    lane = thread % kWarpLanes;
    warp = thread / kWarpLanes;
  }

  // The first of this thread's two tokens; the second is 8 further.
  __device__ int token() const { return warp * kTokensPerQkWarp + lane / 4; }
};
static_assert(kTokensPerQkWarp == 16, "a thread has two tokens of its warp");
