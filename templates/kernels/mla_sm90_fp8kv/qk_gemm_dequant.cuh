// QK GEMM over K dequantized to fp16 in registers.

#pragma once

#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "dequant_k.cuh"
#include "kv_scales.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "qk_gemm_rope.cuh"
#include "score_limits.cuh"
#include "v_scales.cuh"

// Buffers of K fragments, of an MMA each: dequantization overlaps the MMAs in flight.
constexpr int kKBuffers = 4;

struct QkGemm {
  u32 k_desc;
  u32 q_desc;

  // Computes the scores: first those of the codes, relative to the largest scale of their token.
  __device__ void compute(Scores& scores, const KScales& scales, const unsigned char* stage) const {
    const KFragmentLoader stored_k(stage, QkThread());
    StoredK stored[2];
    stored_k.load(stored[0], 0);
    wgmma_fence_operand(scores);
    KFragment k[kKBuffers];
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
      if (step + 1 < kKSteps) stored_k.load(stored[(step + 1) % 2], step + 1);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int mma = step * 2 + half;
        KFragment& fragment = k[mma % kKBuffers];
        if (mma >= kKBuffers) wgmma_wait_group<kKBuffers - 1>();
        dequant_k(fragment, stored[step % 2], scales, step, half);
        add_mma(scores, fragment, mma);
      }
    }
    if constexpr (kStoredRopeDim > 0)
      fence_proxy_async();  // its MMAs read what cp.async has written
    wgmma_wait_group<0>();
    wgmma_fence_operand(scores);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) scores[i] *= scales.score_factor(i / 2 % 2);
    if constexpr (kStoredRopeDim > 0) {
      qk_gemm_rope<true>(scores, k_desc, q_desc);
      wgmma_wait_group<0>();
      wgmma_fence_operand(scores);
    }
  }

  // Issues the MMA over 16 dims.
  __device__ void add_mma(Scores& scores, const KFragment& k, int mma) const {
    constexpr int kTileMmas = kTileRowBytes / (16 * kQueryBytes);
    const u32 q_mma = q_desc + descriptor_step(mma / kTileMmas * kQueryTileBytes +
                                               mma % kTileMmas * 16 * kQueryBytes);
    wgmma_fence();
    wgmma_mma(Fp16{}, scores, k, smem_desc_sw128(q_mma), mma > 0);
    wgmma_commit_group();
  }
};
