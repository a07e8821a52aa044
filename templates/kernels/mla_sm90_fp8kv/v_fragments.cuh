// Values as the left operand of O^T += V^T P^T: out of shared memory into registers, across, and
// converted.

#pragma once

#include "common/fp8.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "output_dims.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mul.cuh"

// Of 32 tokens and a tile of dims: two steps of a product.
constexpr int kValueTokens = 32;
constexpr int kValueSteps = kValueTokens / 16;
constexpr int kHalves = kBlockN / kValueTokens;
using Values = u32[kValueSteps * 4];
using StoredValues = u32[4];
using ValueScales = uint2[kValueTokens / 16];  // of two tokens each, for two matrices

// Values are multiplied in parts: of half of the tokens one tile of dims after the other.
constexpr int kPvSteps = kDimTiles * kHalves;
__device__ constexpr int token_half_of(int pv_step) { return pv_step / kDimTiles; }
__device__ constexpr int dim_tile_of(int pv_step) { return pv_step % kDimTiles; }

// Four matrices of eight tokens each and 16 dims; a lane gets dims 2g and 2g + 1 of tokens 2c and
// 2c + 1 of each, with g = lane / 4 and c = lane % 4.
struct ValueRows {
  const u16* scales;  // of this lane's first two tokens
  u32 address;  // of the row that this lane points to for ldmatrix, in tile 0

  // Of the block at `stage`.
  __device__ explicit ValueRows(unsigned char* stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    scales = &value_scale(stage, lane % 4 * 2, warp * kDimsOfWarp / kScaledDims);
    address = shared_address(stage) + warp / 2 * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 2 * kDimTiles);
  }

  __device__ void load_scales(ValueScales& found, int half) const {
#pragma unroll
    for (int i = 0; i < kValueTokens / 16; ++i) {
      const int token = half * kValueTokens + i * 16;
      found[i] = *reinterpret_cast<const uint2*>(scales + value_scale_index(token, 0));
    }
  }

  // What is stored of part `pv_step`. A tile of dims is a chunk of a row of 128 bytes, of which two
  // warps have four each, and so two bits of the swizzled address.
  __device__ void load(StoredValues& found, int pv_step) const {
    const u32 row = address ^ (dim_tile_of(pv_step) * kChunkBytes);
    ldmatrix_x4_trans(found, row + token_half_of(pv_step) * kValueTokens * kTileRowBytes);
  }
};

__device__ inline void decode_values(Values& values, const StoredValues& stored,
                                     const ValueScales& scales) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32* step = values + i / 2 * 4 + i % 2 * 2;
    const u32 scale = i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y;
    const u32 by_dims = __byte_perm(stored[i], 0, 0x3120);
    step[0] = mul_f16x2(fp16x2_of_e4m3x2(by_dims & 0xffff), scale);
    step[1] = mul_f16x2(fp16x2_of_high_e4m3x2(by_dims), scale);
  }
}
