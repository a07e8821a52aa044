// Operands of the QK and PV GEMMs, over a KV cache in NVFP4: e2m1 with an e4m3 scale for each block
// of 16 dims of a token.

#pragma once

#include "common/fp8.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"

// Elements are converted to fp16 times 2^-14, and multiplied by their scales: both are exact, since
// an e2m1 times an e4m3 is a multiple of 2^-10. Scores and O are multiplied by 2^14.
constexpr float kDequantFactor = 16384.0f;

// A chunk has 32 dims of a token, two blocks; ldmatrix gives a lane eight elements of it as a word.
// Pair `j` of a word has elements j and j + 4. Behind four bits of zero, the exponent and the
// fraction of an e2m1 are those of its value times 2^-14 in fp16, because the exponent biases
// differ by 14.
__device__ inline u32 e2m1_pair(u32 word, int j) {
  const u32 signs = j % 2 == 0 ? word << 4 : word;
  const u32 magnitudes = j % 2 == 0 ? word << 1 : word >> 3;
  const u32 bytes = (signs & 0x80808080) | (magnitudes & 0x0e0e0e0e);
  return __byte_perm(bytes, 0, j < 2 ? 0x2404 : 0x3414);
}

// Loads a lane's fragment of the 16 dims `k` of Q, in the k order of its K fragment: of every 32
// dims a lane has eight adjacent ones, half of them in each of two fragments.
__device__ inline uint2 load_q_fragment(const u16* row, int k) {
  const u32* words = reinterpret_cast<const u32*>(row + k / 2 * 32) + lane_index() % 4 * 4 + k % 2;
  const u32 first = words[0];
  const u32 second = words[2];
  return make_uint2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
}

// The scales of a token of this warp's kv head: those of four blocks, a pair of chunks, in a word.
struct alignas(kScaleRowBytes) ScaleRow {
  u32 pairs[KeyTile::kChunkPairs];
};
__device__ inline const ScaleRow& scale_row_at(const unsigned char* tile, int warp, int step,
                                               int step_token) {
  const int offset = scale_row_offset(warp, step * kStepTokens + step_token);
  return *reinterpret_cast<const ScaleRow*>(tile + offset);
}

// Scales of the two tokens of a lane's K fragments.
struct KeyScales {
  ScaleRow tokens[2];

  __device__ KeyScales(const unsigned char* tile, int warp, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      tokens[half] = scale_row_at(tile, warp, step, half * 8 + lane_index() / 4);
    }
  }

  // The scale of a lane's word of a chunk, twice.
  __device__ u32 of(int half, int pair, int chunk) const {
    const u32 bytes =
        __byte_perm(tokens[half].pairs[pair], 0, lane_index() % 4 < 2 ? 0x2200 : 0x3311);
    return chunk == 0 ? fp16x2_of_e4m3x2(bytes & 0xffff) : fp16x2_of_high_e4m3x2(bytes);
  }
};

// Scales of the four tokens of a lane's V fragments.
struct ValueScales {
  ScaleRow tokens[2][2];

  __device__ ValueScales(const unsigned char* tile, int warp, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tokens[half][i] = scale_row_at(tile, warp, step, half * 8 + lane_index() % 4 * 2 + i);
      }
    }
  }

  // The scales of the two tokens of a lane's word of a chunk.
  __device__ u32 of(int half, int pair, int chunk) const {
    const u32 bytes = __byte_perm(tokens[half][0].pairs[pair], tokens[half][1].pairs[pair],
                                  lane_index() < 16 ? 0x6240 : 0x7351);
    return chunk == 0 ? fp16x2_of_e4m3x2(bytes & 0xffff) : fp16x2_of_high_e4m3x2(bytes);
  }
};

// ldmatrix loads four A fragments, two of each chunk of a pair: of K as they lie, of V transposed.
constexpr int kFragmentsPerLoad = 4;
__device__ inline void k_fragment(const u32 (&loaded)[4], int fragment, const KeyScales& scales,
                                  int pair, u32 (&a)[4]) {
  const int chunk = fragment / 2;
  const int j = fragment % 2 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // of the tokens
    const u32 scale = scales.of(half, pair, chunk);
    a[half] = mul_f16x2(e2m1_pair(loaded[chunk * 2 + half], j), scale);
    a[2 + half] = mul_f16x2(e2m1_pair(loaded[chunk * 2 + half], j + 1), scale);
  }
}

// A word of V has four dims of two tokens.
__device__ inline void v_fragment(const u32 (&loaded)[4], int fragment, const ValueScales& scales,
                                  int pair, u32 (&a)[4]) {
  const int chunk = fragment / 2;
  const int j = fragment % 2 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 scale = scales.of(half, pair, chunk);
    a[half * 2] = mul_f16x2(e2m1_pair(loaded[chunk + half * 2], j), scale);
    a[half * 2 + 1] = mul_f16x2(e2m1_pair(loaded[chunk + half * 2], j + 1), scale);
  }
}

// Zeroes the scales that are NaN.
template <typename ScaleWord>
__device__ inline ScaleWord zero_nonfinite(ScaleWord scales) {
  scales.words[0] &= ~nan_bytes(scales.words[0]);
  return scales;
}

// The scale of an element of a cached V row: NaN if and only if the element is.
__device__ inline float element_at(const unsigned char* scale_row, int dim) {
  return cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(scale_row[dim / 16])));
}

// Stores a warp's accumulators of eight rows and kDims dims to rows of a combine buffer, from
// `first_column` on: of every 32 dims, two tiles, a lane has four adjacent ones.
template <int kDims, int kPitch>
__device__ inline void store_to_combine_buffer(const Output& output, int group, int first_tile,
                                               int first_column,
                                               float (&combine_buffer)[8][kPitch]) {
  static_assert(kDims % 32 == 0, "a sub-tile has whole chunks");
#pragma unroll
  for (int tile = 0; tile < kDims / 16; tile += 2) {
    const float (&first)[4] = output[first_tile + tile][group];
    const float (&second)[4] = output[first_tile + tile + 1][group];
    const int dim = first_column + tile * 16 + lane_index() / 4 * 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      *reinterpret_cast<float4*>(&combine_buffer[row_of(0, r)][dim]) =
          make_float4(first[r], first[2 + r], second[r], second[2 + r]);
    }
  }
}
