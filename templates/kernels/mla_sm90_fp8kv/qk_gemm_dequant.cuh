// QK GEMM over K dequantized to fp16 in registers.

#pragma once

#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "dequant_k.cuh"
#include "kv_scales.cuh"
#include "ptx/wgmma.cuh"
#include "qk_gemm_rope.cuh"
#include "softmax.cuh"
#include "v_scales.cuh"

// Double-buffered K fragments: dequantization overlaps the MMAs in flight.
constexpr int kKBuffers = 2;

struct QkGemm {
  u32 q_desc;

  // Issues the MMAs of the rope part.
  __device__ QkGemm(Scores& scores, u32 k_desc, u32 q_desc) : q_desc(q_desc) {
    if constexpr (kStoredRopeDim > 0) qk_gemm_rope(scores, k_desc, q_desc);
  }

  // Completes the scores. While MMAs are in flight, takes the rope elements for the shared scale of
  // V.
  __device__ void finish(const Params&, Scores& scores, const KScales& scales,
                         ThreadScales& thread_scales, const unsigned char* stage) const {
    const KFragmentLoader stored_k(stage, QkThread());
    StoredK stored[2];
    stored_k.load(stored[0], 0);
    if constexpr (kStoredRopeDim > 0) {
      wgmma_wait_group<0>();
      wgmma_fence_operand(scores);
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) scores[i] *= scales.inverse_score_factor(i / 2 % 2);
    }
    wgmma_fence_operand(scores);
    KFragments k[kKBuffers];
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
      KFragments& fragments = k[step % kKBuffers];
      if (step + 1 < kKSteps) stored_k.load(stored[(step + 1) % 2], step + 1);
      if (step >= kKBuffers) wgmma_wait_group<kKBuffers - 1>();
      dequant_k(fragments, stored[step % 2], scales, step);
      add_step(scores, fragments, step);
      if (kHasRopeInV && step % 2 == 0) thread_scales.add_rope(step / 2);
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(scores);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) scores[i] *= scales.score_factor(i / 2 % 2);
  }

  // Issues the MMAs over the dims of one step.
  __device__ void add_step(Scores& scores, const KFragments& k, int step) const {
    constexpr int kTileSteps = kTileRowBytes / (kKDims * kQueryBytes);
    const u32 q_step = q_desc + descriptor_step(step / kTileSteps * kQueryTileBytes +
                                                step % kTileSteps * kKDims * kQueryBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kKDims / 16; ++i) {
      wgmma_mma(Fp16{}, scores, k + i * 4,
                smem_desc_sw128(q_step + descriptor_step(i * 16 * kQueryBytes)),
                kStoredRopeDim > 0 || step + i > 0);
    }
    wgmma_commit_group();
  }
};
