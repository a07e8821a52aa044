// V fragments: A operand of O^T += V^T P^T, transposed from shared memory into registers and
// dequantised to fp16.

#pragma once

#include "common/fp8.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "output_dims.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/ldmatrix.cuh"

// A fragment has 32 tokens of a tile of dims: two MMAs.
constexpr int kVTokens = 32;
constexpr int kVSteps = kVTokens / 16;
constexpr int kTokenHalves = kBlockN / kVTokens;
using VFragments = u32[kVSteps * 4];
using StoredV = u32[4];
using VScales = uint2[kVTokens / 16];  // two tokens of each of two matrices

// PV steps: for each half of the tokens, one tile of dims after the other.
constexpr int kPvSteps = kDimTiles * kTokenHalves;
__device__ constexpr int token_half_of(int pv_step) { return pv_step / kDimTiles; }
__device__ constexpr int dim_tile_of(int pv_step) { return pv_step % kDimTiles; }

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 2g and 2g + 1
// of tokens 2c and 2c + 1, with g = lane / 4 and c = lane % 4.
struct VLoader {
  const u16* scales;  // of this lane's first two tokens
  u32 address;  // of this lane's ldmatrix row, in tile 0

  // `stage` is the KV block.
  __device__ explicit VLoader(unsigned char* stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    scales = &v_scale(stage, lane % 4 * 2, warp * kDimsPerWarp / kScaledDims);
    address = shared_address(stage) + warp / 2 * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 2 * kDimTiles);
  }

  __device__ void load_scales(VScales& loaded, int half) const {
#pragma unroll
    for (int i = 0; i < kVTokens / 16; ++i) {
      const int token = half * kVTokens + i * 16;
      loaded[i] = *reinterpret_cast<const uint2*>(scales + v_scale_index(token, 0));
    }
  }

  // Loads the stored V of a PV step. A tile of dims is one of the four chunks that a warp has of a
  // row of 128 bytes, so its index is two bits of the swizzled address.
  __device__ void load(StoredV& loaded, int pv_step) const {
    const u32 row = address ^ (dim_tile_of(pv_step) * kChunkBytes);
    ldmatrix_x4_trans(loaded, row + token_half_of(pv_step) * kVTokens * kTileRowBytes);
  }
};

__device__ inline void dequant_v(VFragments& v, const StoredV& stored, const VScales& scales) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32* step = v + i / 2 * 4 + i % 2 * 2;
    const u32 scale = i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y;
    const u32 by_dims = __byte_perm(stored[i], 0, 0x3120);
    step[0] = mul_f16x2(fp16x2_of_e4m3x2(by_dims & 0xffff), scale);
    step[1] = mul_f16x2(fp16x2_of_high_e4m3x2(by_dims), scale);
  }
}
