// Dequantization: K fragments, dequantized to fp16 in registers by scales that are powers of two.

#pragma once

#include "common/fp8.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/warp_matrix.cuh"
#include "v_scales.cuh"

// K fragments: the A operand of S^T = K Q^T. A fragment has the 16 tokens of a warp and 16 dims;
// ldmatrix loads two.
constexpr int kKDims = 32;
constexpr int kKSteps = kCodeDims / kKDims;
using KFragment = u32[4];
using StoredK = u32[4];

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 4c to 4c + 3
// of token g, with g = lane / 4 and c = lane % 4.
struct KFragmentLoader {
  u32 address;  // of this lane's ldmatrix row, in tile 0

  // `stage` is the KV block.
  __device__ KFragmentLoader(const unsigned char* stage, const QkThread& qk_thread) {
    const int token = qk_thread.warp * kTokensPerQkWarp + qk_thread.lane % kTokensPerQkWarp;
    address = shared_address(stage) +
              swizzled_offset<kCodeTileDims>(token, qk_thread.lane / kTokensPerQkWarp);
  }

  // A step is two chunks of a row of 64 or 128 bytes, so its index is a bit or two of the swizzled
  // address.
  __device__ void load(StoredK& loaded, int step) const {
    constexpr int kTileSteps = kCodeTileDims / kKDims;
    const u32 row = address ^ (step % kTileSteps * 2 * kChunkBytes);
    ldmatrix_x4(loaded, row + step / kTileSteps * kCodeTileBytes);
  }
};

// A lane has four adjacent dims of a token in a word. An MMA takes two of them in the lower and two
// in the upper half of its 16: Q is stored in this order.
__device__ inline void dequant_k(KFragment& k, const StoredK& stored, const KScales& scales,
                                 int step, int half) {
#pragma unroll
  for (int token = 0; token < 2; ++token) {
    const u32 scale = scales.fp16x2(token, step * kKDims / kScaledDims);
    const u32 word = stored[half * 2 + token];
    k[token] = mul_f16x2(fp16x2_of_e4m3x2(word & 0xffff), scale);
    k[2 + token] = mul_f16x2(fp16x2_of_high_e4m3x2(word), scale);
  }
}
