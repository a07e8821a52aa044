// The rope part of V for the last PV warp, which converts it from bf16 as stored.

#pragma once

#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "dequant.cuh"
#include "ptx/cvt.cuh"

// A word is two dims of a token, so lanes
// load the words that they need: dims 2g and 2g + 1 of tokens 2c, 2c + 1, 2c + 8 and 2c + 9.
struct RopeVLoader {
  using Stored = u32[kVTokens / 4];

  const unsigned char* stage;
  u32 offset;  // of this lane's first word, in tile 0
  float scale;

  __device__ RopeVLoader(const unsigned char* stage, float shared_scale)
      : stage(stage), scale(shared_scale) {
    const int lane = reload_lane();
    offset = kRopeTileOffset + swizzled_offset<kTileRowBytes>(lane % 4 * 2, lane / 16) +
             lane / 4 % 4 * sizeof(u32);
  }

  // A tile of dims is two chunks of a row. In the next row they are in reverse order.
  __device__ void load(Stored& loaded, int pv_step) const {
    const u32 even_row = offset ^ (dim_tile_of(pv_step) * 2 * kChunkBytes);
    const u32 odd_row = (even_row ^ kChunkBytes) + kTileRowBytes;
#pragma unroll
    for (int i = 0; i < kVTokens / 4; ++i) {
      const int token = token_half_of(pv_step) * kVTokens + i / 2 * 8;
      loaded[i] = *reinterpret_cast<const u32*>(stage + (i % 2 == 0 ? even_row : odd_row) +
                                                token * kTileRowBytes);
    }
  }

  __device__ void dequant(VFragments& v, const Stored& stored) const {
#pragma unroll
    for (int i = 0; i < kVTokens / 8; ++i) {
      u32* step = v + i * 2;
      const u32 low = stored[i * 2];
      const u32 high = stored[i * 2 + 1];
#pragma unroll
      for (int dim = 0; dim < 2; ++dim) {
        step[dim] =
            cvt_rn_x2_f32(Fp16{}, cvt_f32(Bf16{}, static_cast<u16>(high >> dim * 16)) * scale,
                          cvt_f32(Bf16{}, static_cast<u16>(low >> dim * 16)) * scale);
      }
    }
  }
};
static_assert(kVFragmentWords == kVTokens / 4, "as many words are loaded as converted");
