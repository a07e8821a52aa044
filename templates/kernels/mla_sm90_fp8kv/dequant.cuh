// Dequantization: V fragments, dequantized to fp16 in registers.

#pragma once

#include "accumulators.cuh"
#include "common/fp8.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/warp_matrix.cuh"
#include "v_scales.cuh"

// V fragments: the A operand of O^T += V^T P^T, transposed from shared memory into registers.
// A fragment has 32 tokens of a tile of dims: two MMAs.
constexpr int kVTokens = 32;
constexpr int kVSteps = kVTokens / 16;
constexpr int kTokenHalves = kBlockN / kVTokens;
constexpr int kVFragmentWords = kVSteps * 4;
using VFragments = u32[kVFragmentWords];
using StoredV = u32[4];
using VScales = uint2[kVTokens / 16];  // two tokens of each of two matrices

// PV steps: for each half of the tokens, one tile of dims after the other.
constexpr int kPvSteps = kDimTiles * kTokenHalves;
__device__ constexpr int token_half_of(int pv_step) { return pv_step / kDimTiles; }
__device__ constexpr int dim_tile_of(int pv_step) { return pv_step % kDimTiles; }

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 2g and 2g + 1
// of tokens 2c and 2c + 1, with g = lane / 4 and c = lane % 4.
struct VLoader {
  // Tiles of dims of this warp that share a scale.
  static constexpr int kScaledTiles = kScaledDims < kWarpDims ? kScaledDims / kTileDims : kDimTiles;

  const u16* scales;  // of this lane's first two tokens, for tile 0
  u32 address;  // of this lane's ldmatrix row, in tile 0

  // `stage` is the KV block.
  __device__ VLoader(unsigned char* stage, u16* v_scales) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    scales = &v_scales[v_scale_index(lane % 4 * 2, warp * kWarpDims / kScaledDims)];
    constexpr int kWarpsPerTile = kCodeTileDims / kWarpDims;
    address = shared_address(stage) + warp / kWarpsPerTile * kCodeTileBytes +
              swizzled_offset<kCodeTileDims>(lane, warp % kWarpsPerTile * kDimTiles);
  }

  // Loads the scales of a PV step, if they are not those of the one before.
  __device__ void load_scales(VScales& loaded, int pv_step) const {
    if (pv_step % kScaledTiles != 0) return;
#pragma unroll
    for (int i = 0; i < kVTokens / 16; ++i) {
      const int token = token_half_of(pv_step) * kVTokens + i * 16;
      const int group = dim_tile_of(pv_step) / kScaledTiles;
      loaded[i] = *reinterpret_cast<const uint2*>(scales + v_scale_index(token, group));
    }
  }

  // Loads the stored V of a PV step. A tile of dims is one of the four chunks that a warp has of a
  // row of 64 or 128 bytes, so its index is two bits of the swizzled address.
  __device__ void load(StoredV& loaded, int pv_step) const {
    const u32 row = address ^ (dim_tile_of(pv_step) * kChunkBytes);
    ldmatrix_x4_trans(loaded, row + token_half_of(pv_step) * kVTokens * kCodeTileDims);
  }
};

__device__ inline void dequant_v(VFragments& v, const StoredV& stored, const VScales& scales) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32* step = v + i / 2 * 4 + i % 2 * 2;
    const u32 scale = i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y;
    const u32 transposed = transpose_bytes_2x2(stored[i]);
    step[0] = mul_f16x2(fp16x2_of_e4m3x2(transposed & 0xffff), scale);
    step[1] = mul_f16x2(fp16x2_of_high_e4m3x2(transposed), scale);
  }
}
