// V fragments: A operand of O^T += V^T P^T, transposed from shared memory into registers.

#pragma once

#include "common/fp8.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma_operands.cuh"
#include "output_dims.cuh"
#include "ptx/ldmatrix.cuh"
#include "shared_memory.cuh"

constexpr int kPvSteps = kBlockN / kStepElements;  // MMAs per KV block and tile of dims
using VFragments = u32[kPvSteps][4];

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 2g and 2g + 1
// of tokens 2c and 2c + 1. After the byte permutation a word holds four of 16 tokens of one dim, in
// the order of P: 2c, 2c + 8, 2c + 1, 2c + 9.
struct VLoader {
  u32 address;  // of this lane's row, at the warp's dims of tile 0

  // `stage` is the shared address of the KV block.
  __device__ explicit VLoader(u32 stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    address = stage + warp / 4 * (kHalfDims / kTileRowBytes) * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 4);
  }

  // A tile of dims is half a row, four chunks, so `tile % 2` is one bit of the swizzled address.
  __device__ u32 row_address(int tile) const {
    return (address ^ (tile % 2 * 64)) + tile / 2 * kTileBytes;
  }

  __device__ void load(VFragments& v, int tile) const {
    const u32 row = row_address(tile);
#pragma unroll
    for (int k = 0; k < kPvSteps; ++k) {
      u32 loaded[4];
      ldmatrix_x4_trans(loaded, row + k * kStepElements * kTileRowBytes);
      v[k][0] = __byte_perm(loaded[0], loaded[1], 0x6240);
      v[k][1] = __byte_perm(loaded[0], loaded[1], 0x7351);
      v[k][2] = __byte_perm(loaded[2], loaded[3], 0x6240);
      v[k][3] = __byte_perm(loaded[2], loaded[3], 0x7351);
    }
  }

  // Clears NaN in this lane's rows of the KV block, in tokens from `first` on and the dims that
  // only this warp reads. Returns whether any row attends to such a token, that is, one before
  // `num_attended`.
  __device__ bool clear_nan(SharedMemoryPlan& smem, int first, int num_attended) const {
    bool has_attended_nan = false;
#pragma unroll 1
    for (int i = 0; i < kPvSteps * kDimTiles; ++i) {
      const int tile = i / kPvSteps;
      const int token = i % kPvSteps * kStepElements + reload_lane();
      if (token < first) continue;
      const u32 chunk_address = row_address(tile) + i % kPvSteps * kStepElements * kTileRowBytes;
      uint4& dims =
          *reinterpret_cast<uint4*>(smem.kv[0] + (chunk_address - shared_address(smem.kv[0])));
      const uint4 loaded = dims;
      const uint4 cleared = {loaded.x & ~nan_bytes(loaded.x), loaded.y & ~nan_bytes(loaded.y),
                             loaded.z & ~nan_bytes(loaded.z), loaded.w & ~nan_bytes(loaded.w)};
      const u32 differs = (loaded.x ^ cleared.x) | (loaded.y ^ cleared.y) | (loaded.z ^ cleared.z) |
                          (loaded.w ^ cleared.w);
      if (differs == 0) continue;
      dims = cleared;
      has_attended_nan |= token < num_attended;
    }
    return has_attended_nan;
  }
};
