// The rope part of V for the last PV warp, in fp16 in the shared scale, as `thread_token.cuh`
// stores it.

#pragma once

#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "dequant.cuh"
#include "ptx/warp_matrix.cuh"

struct RopeVLoader {
  using Stored = VFragments;

  u32 address;  // of this lane's ldmatrix row, in tile 0

  __device__ RopeVLoader(const unsigned char* stage, float) {
    const int lane = reload_lane();
    address = shared_address(stage) + kRopeTileOffset +
              swizzled_offset<kTileRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
  }

  // A tile of dims is two chunks of a row.
  __device__ void load(Stored& loaded, int pv_step) const {
    const u32 row = address ^ (dim_tile_of(pv_step) * 2 * kChunkBytes);
#pragma unroll
    for (int i = 0; i < kVSteps; ++i) {
      const int token = token_half_of(pv_step) * kVTokens + i * 16;
      ldmatrix_x4_trans(*reinterpret_cast<u32(*)[4]>(loaded + i * 4), row + token * kTileRowBytes);
    }
  }

  __device__ void dequant(VFragments& v, const Stored& stored) const {
#pragma unroll
    for (int i = 0; i < kVFragmentWords; ++i) v[i] = stored[i];
  }
};
