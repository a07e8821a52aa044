// A token with a prologue: RMSNorm of its first elements, and rope of its last ones, if wanted.
// Each of the two rounds to the dtype of the tokens, as an op of its own does. Sums have one order,
// and no product is fused with a sum, so that the torch ops of other devices give the same bits.

#pragma once

#include "common/packed_row.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "elements.cuh"
#include "ptx/cvt.cuh"

struct Token {
  float scaled[kLaneElements] = {};  // of the codes
  float rest[kLaneElements] = {};  // of the bf16 elements
};

constexpr bool kNormsRest = KvRow::kElements == kNormElements;
static_assert(kNormsRest || kScaledElements == kNormElements, "the norm splits no part");
static_assert(kNormElements <= kWarpLanes * kLaneElements, "a lane has elements of the norm once");
constexpr int kRopeLanes = kRopeElements / kLaneElements;
static_assert(kRestLanes == 0 || kRestLanes == kRopeLanes, "bf16 elements are the rope part");

// Rounds two numbers to the dtype of the tokens.
__device__ inline void round_pair(float& low, float& high) {
  const u32 packed = cvt_rn_x2_f32(Element{}, high, low);
  low = cvt_f32(Element{}, static_cast<u16>(packed));
  high = cvt_f32(Element{}, static_cast<u16>(packed >> 16));
}

__device__ inline float sum_of_squares(const float (&values)[kLaneElements]) {
  float sum = __fmul_rn(values[0], values[0]);
#pragma unroll
  for (int i = 1; i < kLaneElements; ++i) sum = __fadd_rn(sum, __fmul_rn(values[i], values[i]));
  return sum;
}

__device__ inline void normalize_elements(const unsigned char* weight, float inverse_rms,
                                          float (&values)[kLaneElements]) {
  float weights[kLaneElements];
  load_elements(weight, weights);
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 2) {
    values[i] = __fmul_rn(__fmul_rn(values[i], inverse_rms), weights[i]);
    values[i + 1] = __fmul_rn(__fmul_rn(values[i + 1], inverse_rms), weights[i + 1]);
    round_pair(values[i], values[i + 1]);
  }
}

__device__ inline void normalize(const Params& params, Token& token) {
  float sum = sum_of_squares(token.scaled);
  // Other lanes than those of the codes.
  if constexpr (kNormsRest) sum = __fadd_rn(sum, sum_of_squares(token.rest));
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, lanes));
  }
  const float mean = __fmul_rn(sum, 1.0f / kNormElements);
  const float inverse_rms = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, params.norm_eps)));
  constexpr int kLaneBytes = kLaneElements * 2;
  if (lane_index() < kScaledLanes) {
    const unsigned char* weight = params.norm_weight + lane_index() * kLaneBytes;
    normalize_elements(weight, inverse_rms, token.scaled);
  }
  if (kNormsRest && rest_lane_index() < kRestLanes) {
    const int offset = (kScaledLanes + rest_lane_index()) * kLaneBytes;
    normalize_elements(params.norm_weight + offset, inverse_rms, token.rest);
  }
}

// Rotates pairs of neighbors, those of one of the kRopeLanes lanes. A position that the table does
// not have gives NaN.
__device__ inline void rotate(const Params& params, int index, int rope_lane,
                              float (&values)[kLaneElements]) {
  const i64 position = params.has_wide_positions != 0
                           ? reinterpret_cast<const i64*>(params.positions)[index]
                           : reinterpret_cast<const int*>(params.positions)[index];
  const bool is_valid = position >= 0 && position < params.num_positions;
  const float* cosines = params.cos_sin_cache + (is_valid ? position : 0) * kRopeElements;
  cosines += rope_lane * kLaneElements / 2;
  const float* sines = cosines + kRopeElements / 2;
#pragma unroll
  for (int chunk = 0; chunk < 2; ++chunk) {
    const Chunk cosine_chunk = reinterpret_cast<const Chunk*>(cosines)[chunk];
    const Chunk sine_chunk = reinterpret_cast<const Chunk*>(sines)[chunk];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      float& even = values[chunk * 8 + pair * 2];
      float& odd = values[chunk * 8 + pair * 2 + 1];
      const float cosine = __uint_as_float(is_valid ? cosine_chunk.words[pair] : kMagnitude);
      const float sine = __uint_as_float(sine_chunk.words[pair]);
      const float rotated = __fadd_rn(__fmul_rn(even, cosine), -__fmul_rn(odd, sine));
      odd = __fadd_rn(__fmul_rn(even, sine), __fmul_rn(odd, cosine));
      even = rotated;
      round_pair(even, odd);
    }
  }
}

__device__ inline void load_token(const Params& params, int index, Token& token) {
  const int lane = lane_index(), rest_lane = rest_lane_index();
  constexpr int kLaneBytes = kLaneElements * 2;
  const unsigned char* scaled = params.scaled + index * params.scaled_stride;
  if (lane < kScaledLanes) load_elements(scaled + lane * kLaneBytes, token.scaled);
  const unsigned char* rest = params.rest + index * params.rest_stride;
  if (rest_lane < kRestLanes) load_elements(rest + rest_lane * kLaneBytes, token.rest);

  if (params.norm_weight != nullptr) normalize(params, token);
  if (params.cos_sin_cache == nullptr) return;
  if constexpr (kRestLanes > 0) {
    if (rest_lane < kRestLanes) rotate(params, index, rest_lane, token.rest);
  } else if (lane >= kScaledLanes - kRopeLanes) {
    rotate(params, index, lane - (kScaledLanes - kRopeLanes), token.scaled);
  }
}

// Stores the lane's elements in the dtype of the tokens; every NaN is the same.
__device__ inline void store_elements(const float (&values)[kLaneElements], unsigned char* target) {
  constexpr u32 kNan = kIsSame<Element, Bf16> ? 0x7fc0 : 0x7e00;
  Chunk chunks[2];
#pragma unroll
  for (int i = 0; i < kLaneElements; i += 2) {
    const u32 packed = cvt_rn_x2_f32(Element{}, values[i + 1], values[i]);
    const u32 low = values[i] != values[i] ? kNan : packed & 0xffff;
    const u32 high = values[i + 1] != values[i + 1] ? kNan : packed >> 16;
    chunks[i / 8].words[i % 8 / 2] = low | high << 16;
  }
  reinterpret_cast<Chunk*>(target)[0] = chunks[0];
  reinterpret_cast<Chunk*>(target)[1] = chunks[1];
}

__device__ inline void copy_scaled(const Params&, int, const Token& token, unsigned char* target) {
  store_elements(token.scaled, target);
}

__device__ inline void copy_rest(const Params&, int, const Token& token, unsigned char* target) {
  store_elements(token.rest, target);
}

__device__ inline void store_rest(const Params&, int, const Token& token, unsigned char* target,
                                  float scale) {
  store_bf16(target, token.rest, scale);
}
