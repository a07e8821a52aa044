// QK GEMM over the rope part of a KV block.

#pragma once

#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/wgmma.cuh"
#include "score_limits.cuh"

// K dimension of an FP8 MMA.
constexpr int kStepElements = 32;
constexpr int kHalfTileBytes = kTileRowBytes / 2;  // hi terms, then lo terms of a rope row

// Issues the QK GEMM over the rope part, whose scores overwrite those of `scores`, or add to them.
template <bool kAdds = false>
__device__ inline void qk_gemm_rope(Scores& scores, u32 k_desc, u32 q_desc) {
  k_desc += descriptor_step(kRopeTileOffset);
  q_desc += descriptor_step(kCodeTiles * kQueryTileBytes);
  wgmma_fence_operand(scores);
  wgmma_fence();
  if constexpr (kHasBf16Rope) {
#pragma unroll
    for (int k = 0; k < kStoredRopeDim / 16; ++k) {
      const u32 k_offset = descriptor_step(k * 32);
      wgmma_mma(Bf16{}, scores, smem_desc_sw128(k_desc + k_offset),
                smem_desc_sw128(q_desc + k_offset), kAdds || k > 0);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kStoredRopeDim / kStepElements; ++k) {
      const u32 k_offset = descriptor_step(k * kStepElements);
      const u64 k_smem_desc = smem_desc_sw64(k_desc + k_offset);
      wgmma_mma(E4m3{}, scores, k_smem_desc, smem_desc_sw128(q_desc + k_offset), k > 0);
      if constexpr (kSplitsQ) {
        const u32 q_lo = q_desc + k_offset + descriptor_step(kHalfTileBytes);
        wgmma_mma(E4m3{}, scores, k_smem_desc, smem_desc_sw128(q_lo), 1);
      }
    }
  }
  wgmma_commit_group();
}
