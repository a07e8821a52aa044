// What a PV thread that has the softmax takes of a token for V: two of its scales and 16 of its
// rope elements.

#pragma once

#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "v_scales.cuh"

// Four adjacent threads share a token, as they share a row of scores.
constexpr int kThreadsPerToken = kPvThreads / kBlockN;
static_assert(kThreadsPerToken == 4 && kScaleGroups > 6 && kScaleGroups <= 8,
              "a thread has two scales, the last one perhaps one and padding");
static_assert(kStoredRopeDim == kThreadsPerToken * kTileDims, "and a tile of rope dims");

struct ThreadToken {
  u32 codes;  // of the two scales
  Chunk rope[2];
  float amax;  // of the finite scales, and of what a scale must be for the rope elements

  __device__ explicit ThreadToken(unsigned char* stage) {
    const int thread = reload_tid();
    const int first = thread % kThreadsPerToken * 2;
    codes = *reinterpret_cast<const u16*>(stage + kScalesOffset +
                                          thread / kThreadsPerToken * kTokenScaleBytes + first);
    if (first + 1 == kScaleGroups) codes &= 0xff;
    u32 rope_amax = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rope[i] = rope_chunk(stage, i);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        rope_amax = max_u16x2(rope_amax, rope[i].words[word] & 0x7fff7fff);
      }
    }
    const int largest = max(finite_code(codes & 0xff), finite_code(codes >> 8));
    amax = pow2_of_ue8m0(static_cast<u32>(max(max(largest, code_of_rope_amax(rope_amax)), 0)));
  }

  // -1 for a NaN.
  __device__ static int finite_code(u32 code) {
    return code == kUe8m0Nan ? -1 : static_cast<int>(code);
  }

  __device__ static Chunk& rope_chunk(unsigned char* stage, int i) {
    const int thread = reload_tid();
    const u32 offset = swizzled_offset<kTileRowBytes>(thread / kThreadsPerToken,
                                                      thread % kThreadsPerToken * 2 + i);
    return *reinterpret_cast<Chunk*>(stage + kRopeTileOffset + offset);
  }

  __device__ bool exceeds_max_scaled(float shared_scale) const {
    return amax * shared_scale >= kMaxScaled;
  }

  // Stores the V scales, and the rope elements as fp16 in their place: the even dims in the first
  // chunk, the odd ones in the second, as ldmatrix gives them to the rows of an MMA.
  __device__ void store(unsigned char* stage, u16* v_scales, float shared_scale) const {
    const int thread = reload_tid();
    u16* first = v_scales + v_scale_index(thread / kThreadsPerToken, thread % kThreadsPerToken * 2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = pow2_of_ue8m0(codes >> i * 8 & 0xff) * shared_scale;
      first[v_scale_index(0, i)] = static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, scale));
    }
    Chunk even;
    Chunk odd;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 low = rope[i / 2].words[i % 2 * 2];
      const u32 high = rope[i / 2].words[i % 2 * 2 + 1];
      even.words[i] = cvt_rn_x2_f32(Fp16{}, __uint_as_float(high << 16) * shared_scale,
                                    __uint_as_float(low << 16) * shared_scale);
      odd.words[i] = cvt_rn_x2_f32(Fp16{}, __uint_as_float(high & 0xffff0000) * shared_scale,
                                   __uint_as_float(low & 0xffff0000) * shared_scale);
    }
    rope_chunk(stage, 0) = even;
    rope_chunk(stage, 1) = odd;
  }
};
