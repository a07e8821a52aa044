// KV scales in fp32: as stored for K, and those that a thread stores as V scales.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "v_scales.cuh"

// K scales of a thread's two tokens.
struct KScales {
  float per_token[2][kScaleGroups];

  __device__ KScales(const unsigned char* stage, const QkThread& qk_thread) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 loaded =
          reinterpret_cast<const float4*>(stage + kScalesOffset)[qk_thread.token() + half * 8];
      const float scales[kScaleGroups] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        // Equal scales take one register.
        per_token[half][group] = scales[kHasPerTokenScale ? 0 : group];
      }
    }
  }

  __device__ float of(int half, int group) const { return per_token[half][group]; }
};

// Scales of the group lane % 4 alone, which this thread stores as V scales.
struct ThreadScales {
  float per_token[2];

  __device__ void select(const KScales& scales, const unsigned char*, const QkThread& qk_thread) {
    const int group = qk_thread.lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = group % 2 == 0 ? scales.per_token[half][0] : scales.per_token[half][1];
      const float high = group % 2 == 0 ? scales.per_token[half][2] : scales.per_token[half][3];
      per_token[half] = group < 2 ? low : high;
    }
  }

  __device__ bool exceeds_max_scaled(float shared_scale) const {
    return amax() * shared_scale >= kMaxScaled;
  }

  // V has no rope part.
  __device__ static void add_rope(int) {}
  __device__ static bool rope_exceeds_max_scaled(float) { return false; }

  // Largest finite magnitude.
  __device__ float amax() const {
    const float a = fabsf(per_token[0]);
    const float b = fabsf(per_token[1]);
    return fmaxf(a <= kFloatMax ? a : 0.0f, b <= kFloatMax ? b : 0.0f);
  }

  // Overwrites the stored scales, which all lanes of the warp must have read.
  __device__ void store(unsigned char* stage, const QkThread& qk_thread, float shared_scale) const {
    u16* first = &v_scale(stage, qk_thread.token(), qk_thread.lane % 4);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[v_scale_index(half * 8, 0)] =
          static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, per_token[half] * shared_scale));
    }
  }
};
static_assert(kScaleGroups == 4, "a thread stores the scales of one group");
