// Values as the left operand of O^T += V^T P^T: out of shared memory into registers, across.

#pragma once

#include "common/fp8_nan.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma_operands.cuh"
#include "output_dims.cuh"
#include "ptx/ldmatrix.cuh"
#include "shared_memory.cuh"

constexpr int kSteps = kBlockN / kStepElements;  // of a block
using Values = u32[kSteps][4];

// Four matrices of eight tokens each and 16 dims; a lane gets dims 2g and 2g + 1 of tokens 2c and
// 2c + 1 of each. Permuted by bytes, a word holds four tokens of one dim, of 16 in the order 2c,
// 2c + 8, 2c + 1, 2c + 9, as P does.
struct ValueRows {
  u32 address;  // of this lane's row, of the warp's dims of tile 0

  // Of the block at `stage`.
  __device__ explicit ValueRows(u32 stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    address = stage + warp / 4 * (kHalfDims / kTileRowBytes) * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 4);
  }

  // Of tile `tile` of dims: half a row, four chunks, and so one bit of the swizzled address.
  __device__ u32 row_of(int tile) const {
    return (address ^ (tile % 2 * 64)) + tile / 2 * kTileBytes;
  }

  __device__ void load(Values& values, int tile) const {
    const u32 row = row_of(tile);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      u32 found[4];
      ldmatrix_x4_trans(found, row + k * kStepElements * kTileRowBytes);
      values[k][0] = __byte_perm(found[0], found[1], 0x6240);
      values[k][1] = __byte_perm(found[0], found[1], 0x7351);
      values[k][2] = __byte_perm(found[2], found[3], 0x6240);
      values[k][3] = __byte_perm(found[2], found[3], 0x7351);
    }
  }

  // Puts zeros for NaN in the tokens of the block from `first` on, of the warp's dims, which nobody
  // else reads: where this lane's rows are. Says whether one of those before `num_visible` had any,
  // so that a row sees it.
  __device__ bool clear_nan(SharedMemoryPlan& smem, int first, int num_visible) const {
    bool has_visible_nan = false;
#pragma unroll 1
    for (int i = 0; i < kSteps * kDimTiles; ++i) {
      const int tile = i / kSteps;
      const int token = i % kSteps * kStepElements + reload_lane();
      if (token < first) continue;
      const u32 chunk_address = row_of(tile) + i % kSteps * kStepElements * kTileRowBytes;
      uint4& dims =
          *reinterpret_cast<uint4*>(smem.kv[0] + (chunk_address - shared_address(smem.kv[0])));
      const uint4 found = dims;
      const uint4 cleared = {found.x & ~nan_bytes(found.x), found.y & ~nan_bytes(found.y),
                             found.z & ~nan_bytes(found.z), found.w & ~nan_bytes(found.w)};
      const u32 differs = (found.x ^ cleared.x) | (found.y ^ cleared.y) | (found.z ^ cleared.z) |
                          (found.w ^ cleared.w);
      if (differs == 0) continue;
      dims = cleared;
      has_visible_nan |= token < num_visible;
    }
    return has_visible_nan;
  }
};
