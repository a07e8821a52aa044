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

// Words of four codes of a token; the last may have padding.
constexpr int kCodeWords = (kScaleGroups + 3) / 4;
struct alignas(kCodeWords * sizeof(u32)) ScaleCodes {
  u32 words[kCodeWords];
};

// The codes of a token, as stored.
__device__ inline const ScaleCodes& scale_codes(const unsigned char* stage, int token) {
  return *reinterpret_cast<const ScaleCodes*>(stage + kScalesOffset + token * kTokenScaleBytes);
}

// K scales of a thread's two tokens. K in fp16 is relative to the largest scale of its token, which
// becomes 2^6, or to 2^-27 if that is larger: what is below 2^-24 then is lost.
struct KScales {
  static constexpr int kMaxFp16Exponent = 6;
  static constexpr u32 kMinCode = 100;

  ScaleCodes codes[2];
  u32 largest[2];  // code of the scale that becomes the largest in fp16
  bool is_nan[2];  // whether a token has a scale that is NaN

  __device__ KScales(const unsigned char* stage, const QkThread& qk_thread) {
    constexpr u32 kPaddingMask = ~0u >> (kCodeWords * 4 - kScaleGroups) * 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      codes[half] = scale_codes(stage, qk_thread.token() + half * 8);
      u32(&words)[kCodeWords] = codes[half].words;
      words[kCodeWords - 1] &= kPaddingMask;
      is_nan[half] = (nan_codes(words[0]) | nan_codes(words[1])) != 0;
#pragma unroll
      for (int i = 2; i < kCodeWords; ++i) is_nan[half] |= nan_codes(words[i]) != 0;
      largest[half] = max(largest_of(codes[half]), kMinCode);
    }
  }

  // The upper bit of each byte that is 255.
  __device__ static u32 nan_codes(u32 word) {
    return ((word & 0x7f7f7f7f) + 0x01010101) & word & 0x80808080;
  }

  __device__ static u32 largest_of(const ScaleCodes& codes) {
    constexpr u32 kBytes = 0x00ff00ff;
    u32 even = max_u16x2(codes.words[0] & kBytes, codes.words[1] & kBytes);
    u32 odd = max_u16x2(codes.words[0] >> 8 & kBytes, codes.words[1] >> 8 & kBytes);
#pragma unroll
    for (int i = 2; i < kCodeWords; ++i) {
      even = max_u16x2(even, codes.words[i] & kBytes);
      odd = max_u16x2(odd, codes.words[i] >> 8 & kBytes);
    }
    const u32 both = max_u16x2(even, odd);
    return max(both & 0xffff, both >> 16);
  }

  // Times kKScaleFactor; NaN of the first group if a scale is NaN.
  __device__ float of(int half, int group) const {
    const u32 word = codes[half].words[group / 4];
    const float scale = pow2_of_ue8m0(word >> group % 4 * 8 & 0xff) * kKScaleFactor;
    return group == 0 && is_nan[half] ? __uint_as_float(0x7fffffff) : scale;
  }

  // Relative to the largest, twice.
  __device__ u32 fp16x2(int half, int group) const {
    const u32 word = codes[half].words[group / 4];
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
  static constexpr u32 kScoreFactorBias = kMaxFp16Exponent + 26;
  static_assert(kKScaleFactor == 0x1p-26f, "the bias of the code of a score factor includes it");
};

// The code of a scale for rope elements whose amax is in either half, as bf16 bits: scaled like 448
// times the scale, they are below kMaxV. -1 for a NaN.
__device__ inline int code_of_rope_amax(u32 amax) {
  const int exponent = static_cast<int>(max(amax & 0xffff, amax >> 16) >> 7);
  return exponent == kUe8m0Nan ? -1 : exponent - 8;
}

// Scales of two or four groups from that of c = lane % 4 on, which this thread stores as V scales.
struct ThreadScales {
  static constexpr int kGroups = kScaleGroups > 8 ? 4 : 2;
  static constexpr int kWords = kGroups / 2;
  static constexpr int kRopeParts = kTokensPerQkWarp * kRopeBytes / (kWarpLanes * kChunkBytes);

  u32 codes[kWords];  // of the first token, then of the second
  u32 rope_amax;  // bf16 bits: of some elements of the warp's tokens, in both halves
  const Chunk* rope;  // of this lane

  __device__ void select(const KScales& scales, const unsigned char* stage,
                         const QkThread& qk_thread) {
    const int lane = qk_thread.lane % 4;
    if constexpr (kWords == 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        codes[half] = scale_codes(stage, qk_thread.token() + half * 8).words[lane];
      }
    } else {
      codes[0] = __byte_perm(lane < 2 ? scales.codes[0].words[0] : scales.codes[0].words[1],
                             lane < 2 ? scales.codes[1].words[0] : scales.codes[1].words[1],
                             lane % 2 == 0 ? 0x5410 : 0x7632);
    }
    rope_amax = 0;
    rope = reinterpret_cast<const Chunk*>(stage + kRopeTileOffset) +
           qk_thread.warp * kRopeParts * kWarpLanes + qk_thread.lane;
  }

  // The larger of every other code, plus one: then NaN is the smallest.
  __device__ static u32 larger_codes(u32 word) {
    constexpr u32 kBytes = 0x00ff00ff;
    constexpr u32 kOnes = 0x00010001;
    return max_u16x2(((word & kBytes) + kOnes) & kBytes, ((word >> 8 & kBytes) + kOnes) & kBytes);
  }

  // The largest code that is not NaN; -1 without one.
  __device__ int largest_code() const {
    u32 larger = larger_codes(codes[0]);
    if constexpr (kWords == 2) larger = max_u16x2(larger, larger_codes(codes[1]));
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

  __device__ int code_of_rope() const { return code_of_rope_amax(rope_amax); }

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
    u16* first = &v_scale(stage, qk_thread.token(), qk_thread.lane % 4 * kGroups);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kGroups * 2; ++i) {
      const float scale = pow2_of_ue8m0(codes[i / 4] >> i % 4 * 8 & 0xff) * shared_scale;
      first[v_scale_index(i / kGroups * 8, i % kGroups)] =
          static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, scale));
    }
  }
};
static_assert((kScaleGroups > 4 && kScaleGroups <= 8) || kScaleGroups == 16,
              "four lanes store two groups each, or four");
