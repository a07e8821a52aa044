// KV scales in UE8M0: powers of two for K, and those that a thread stores as V scales.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "v_scales.cuh"

constexpr u32 kUe8m0Nan = 255;

// The power of two of a code; infinity for a NaN.
__device__ inline float pow2_of_ue8m0(u32 code) { return __uint_as_float(code << 23); }

// K scales of a thread's two tokens. K in fp16 is relative to the largest scale of its token, which
// becomes 2^6, or to 2^-27 if that is larger: what is below 2^-24 then is lost.
struct KScales {
  static constexpr int kMaxFp16Exponent = 6;
  static constexpr u32 kMinCode = 100;

  uint2 codes[2];
  u32 largest[2];  // code of the scale that becomes the largest in fp16
  bool is_nan[2];  // whether a token has a scale that is NaN

  __device__ KScales(const unsigned char* stage, const QkThread& qk_thread) {
    constexpr u32 kPaddingMask = ~0u >> (sizeof(uint2) - kScaleGroups) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = qk_thread.token() + half * 8;
      codes[half] = *reinterpret_cast<const uint2*>(stage + kScalesOffset + token * kChunkBytes);
      codes[half].y &= kPaddingMask;
      is_nan[half] = (nan_codes(codes[half].x) | nan_codes(codes[half].y)) != 0;
      largest[half] = max(largest_of(codes[half]), kMinCode);
    }
  }

  // The upper bit of each byte that is 255.
  __device__ static u32 nan_codes(u32 word) {
    return ((word & 0x7f7f7f7f) + 0x01010101) & word & 0x80808080;
  }

  __device__ static u32 largest_of(const uint2& codes) {
    constexpr u32 kBytes = 0x00ff00ff;
    const u32 even = max_u16x2(codes.x & kBytes, codes.y & kBytes);
    const u32 odd = max_u16x2(codes.x >> 8 & kBytes, codes.y >> 8 & kBytes);
    const u32 both = max_u16x2(even, odd);
    return max(both & 0xffff, both >> 16);
  }

  // Times kKScaleFactor; NaN of the first group if a scale is NaN.
  __device__ float of(int half, int group) const {
    const u32 word = group < 4 ? codes[half].x : codes[half].y;
    const float scale = pow2_of_ue8m0(word >> group % 4 * 8 & 0xff) * kKScaleFactor;
    return group == 0 && is_nan[half] ? __uint_as_float(0x7fffffff) : scale;
  }

  // Relative to the largest, twice.
  __device__ u32 fp16x2(int half, int group) const {
    const u32 word = group < 4 ? codes[half].x : codes[half].y;
    const int code = static_cast<int>(word >> group % 4 * 8 & 0xff);
    const int exponent = code - static_cast<int>(largest[half]) + 127 + kMaxFp16Exponent;
    const float scale = __uint_as_float(static_cast<u32>(max(exponent, 0)) << 23);
    return cvt_rn_x2_f32(Fp16{}, scale, scale);
  }

  // The factor from scores of K in fp16 to those of K, times kKScaleFactor; NaN if a scale is NaN.
  __device__ float score_factor(int half) const {
    const float factor = pow2_of_ue8m0(largest[half] - kScoreFactorBias);
    return is_nan[half] ? __uint_as_float(0x7fffffff) : factor;
  }
  __device__ float inverse_score_factor(int half) const {
    return pow2_of_ue8m0(254 + kScoreFactorBias - largest[half]);
  }
  static constexpr u32 kScoreFactorBias = kMaxFp16Exponent + 26;
  static_assert(kKScaleFactor == 0x1p-26f, "the bias of the code of a score factor includes it");
};

// Scales of groups 2c and 2c + 1 with c = lane % 4, which this thread stores as V scales.
struct ThreadScales {
  static constexpr int kRopeParts = kTokensPerQkWarp * kRopeBytes / (kWarpLanes * kChunkBytes);

  u32 codes;  // of the first token, then of the second
  u32 rope_amax;  // bf16 bits: of some elements of the warp's tokens, in both halves
  const Chunk* rope;  // of this lane

  __device__ void select(const KScales& scales, const unsigned char* stage,
                         const QkThread& qk_thread) {
    const int groups = qk_thread.lane % 4;
    codes = __byte_perm(groups < 2 ? scales.codes[0].x : scales.codes[0].y,
                        groups < 2 ? scales.codes[1].x : scales.codes[1].y,
                        groups % 2 == 0 ? 0x5410 : 0x7632);
    rope_amax = 0;
    rope = reinterpret_cast<const Chunk*>(stage + kRopeTileOffset) +
           qk_thread.warp * kRopeParts * kWarpLanes + qk_thread.lane;
  }

  // The largest code that is not NaN; -1 without one.
  __device__ int largest_code() const {
    constexpr u32 kBytes = 0x00ff00ff;
    constexpr u32 kOnes = 0x00010001;
    // Plus one, NaN is the smallest.
    const u32 larger =
        max_u16x2(((codes & kBytes) + kOnes) & kBytes, ((codes >> 8 & kBytes) + kOnes) & kBytes);
    return static_cast<int>(max(larger & 0xffff, larger >> 16)) - 1;
  }

  // Takes a part of the rope elements of the warp's tokens, if there is a part of this number.
  __device__ void add_rope(int part) {
    if (part >= kRopeParts) return;
    const Chunk loaded = rope[part * kWarpLanes];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      rope_amax = max_u16x2(rope_amax, loaded.words[word] & 0x7fff7fff);
    }
  }

  // The code of a scale for the rope elements: scaled like 448 times it, they are below kMaxV.
  __device__ int code_of_rope() const {
    const int exponent = static_cast<int>(max(rope_amax & 0xffff, rope_amax >> 16) >> 7);
    return exponent == kUe8m0Nan ? -1 : exponent - 8;
  }

  __device__ bool exceeds_max_scaled(float shared_scale) const {
    return pow2_of_ue8m0(static_cast<u32>(max(largest_code(), 0))) * shared_scale >= kMaxScaled;
  }
  __device__ bool rope_exceeds_max_scaled(float shared_scale) const {
    return pow2_of_ue8m0(static_cast<u32>(max(code_of_rope(), 0))) * shared_scale >= kMaxScaled;
  }

  // Of the finite scales, and of what a scale must be for the rope elements.
  __device__ float amax() const {
    return pow2_of_ue8m0(static_cast<u32>(max(max(largest_code(), code_of_rope()), 0)));
  }

  // Overwrites the stored scales, which all lanes of the warp must have read.
  __device__ void store(unsigned char* stage, const QkThread& qk_thread, float shared_scale) const {
    u16* first = &v_scale(stage, qk_thread.token(), qk_thread.lane % 4 * 2);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = pow2_of_ue8m0(codes >> i * 8 & 0xff) * shared_scale;
      first[v_scale_index(i / 2 * 8, i % 2)] = static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, scale));
    }
  }
};
static_assert(kScaleGroups > 4 && kScaleGroups <= 8, "four lanes store two groups each");
