// QK GEMM over K in FP8 as stored: the dims of a scale group accumulate on their own.

#pragma once

#include "common/params.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/wgmma.cuh"
#include "qk_gemm_rope.cuh"
#include "score_limits.cuh"

// Q of a tile of K: hi terms in a tile, lo terms in the next one, or a row of both in one tile.
// Interleaved ones are read as rows of 64 bytes each.
constexpr int kQueryTermsBytes = kQueryBytes * kQueryTileBytes * kCodeTileDims / kTileRowBytes;
constexpr int kQueryLoOffset = kCodeTileDims < kTileRowBytes ? kHalfTileBytes : kQueryTileBytes;
constexpr int kQueryRowBytes = kInterleavesQTerms ? kHalfTileBytes : kTileRowBytes;

template <int kRowBytes>
__device__ inline u64 smem_desc(u32 low) {
  return kRowBytes == kTileRowBytes ? smem_desc_sw128(low) : smem_desc_sw64(low);
}

using GroupScores = float[kStacksQTerms ? kBlockM : kBlockM / 2];

// The terms of score `i` among those of a group: in halves, or in adjacent columns.
__device__ constexpr int hi_score(int i) {
  return kInterleavesQTerms ? (i / 4 * 2 + i % 2) * 4 + i / 2 % 2 * 2 : i;
}
__device__ constexpr int lo_score(int i) {
  return kInterleavesQTerms ? hi_score(i) + 1 : i + kBlockM / 2;
}

// Scale groups whose MMAs are in flight at once, as many as registers allow.
constexpr int kGroupsInFlight = kBlockM > 32 ? 1 : sizeof(GroupScores) > 64 ? 2 : 4;

struct QkGemm {
  GroupScores pending_scores[kGroupsInFlight];
  u32 k_desc;
  u32 q_desc;

  // Issues the first MMAs, those of the rope part into `scores`.
  __device__ QkGemm(Scores& scores, u32 k_desc, u32 q_desc) : k_desc(k_desc), q_desc(q_desc) {
    if constexpr (kStoredRopeDim > 0) qk_gemm_rope(scores, k_desc, q_desc);
#pragma unroll
    for (int group = 0; group < kGroupsInFlight; ++group) add_group(pending_scores[group], group);
  }

  // Issues the MMAs over the dims of one scale group.
  __device__ void add_group(GroupScores& group_scores, int group) const {
    constexpr int kTileGroups = kCodeTileDims / kScaledDims;
    const int tile = group / kTileGroups;
    const int first_byte = group % kTileGroups * kScaledDims;  // of a row of the tile
    const u32 k_group = k_desc + descriptor_step(tile * kCodeTileBytes + first_byte);
    const u32 q_group = q_desc + descriptor_step(tile * kQueryTermsBytes + first_byte);
    wgmma_fence_operand(group_scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kScaledDims / kStepElements; ++k) {
      const u32 k_offset = descriptor_step(k * kStepElements);
      const u64 k_smem_desc = smem_desc<kCodeTileDims>(k_group + k_offset);
      wgmma_mma(E4m3{}, group_scores, k_smem_desc, smem_desc<kQueryRowBytes>(q_group + k_offset),
                k > 0);
      if constexpr (kSplitsQ && !kStacksQTerms) {
        const u32 q_lo = q_group + k_offset + descriptor_step(kQueryLoOffset);
        wgmma_mma(E4m3{}, group_scores, k_smem_desc, smem_desc<kQueryRowBytes>(q_lo), 1);
      }
    }
    wgmma_commit_group();
  }

  // Completes the scores.
  __device__ void finish(const Params& params, Scores& scores, const KScales& scales,
                         ThreadScales& thread_scales, const unsigned char*) {
    if constexpr (kStoredRopeDim > 0) {
      wgmma_wait_group<kGroupsInFlight>();
      scale_rope(params, scores, scales);
    }
    promote_groups<0>(scores, scales, thread_scales);
  }

  // A bf16 rope part may have no scale.
  __device__ static void scale_rope(const Params& params, Scores& scores, const KScales& scales) {
    wgmma_fence_operand(scores);
    if constexpr (kHasBf16Rope && !KvRow::kScalesBf16) return;
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      scores[i] *= kHasPerTokenScale ? scales.of(i / 2 % 2, 0) : params.rope_scale;
    }
  }

  // Promotes the scale groups from `kGroup` on, and refills the MMAs in flight. While they are,
  // takes a part of the rope elements for the shared scale of V.
  template <int kGroup>
  __device__ void promote_groups(Scores& scores, const KScales& scales,
                                 ThreadScales& thread_scales) {
    constexpr int kRemaining = kScaleGroups - 1 - kGroup;
    constexpr int kNext = kGroup + kGroupsInFlight;
    wgmma_wait_group<(kRemaining < kGroupsInFlight ? kRemaining : kGroupsInFlight - 1)>();
    GroupScores& group_scores = pending_scores[kGroup % kGroupsInFlight];
    add_scaled_group(scores, group_scores, scales, kGroup);
    if constexpr (kNext < kScaleGroups) add_group(group_scores, kNext);
    if constexpr (kHasRopeInV) thread_scales.add_rope(kGroup);
    if constexpr (kRemaining > 0) promote_groups<kGroup + 1>(scores, scales, thread_scales);
  }

  // Adds the scores of a scale group, times the K scales of tokens g and g + 8. Without a rope
  // part, the first group overwrites them.
  __device__ static void add_scaled_group(Scores& scores, GroupScores& group_scores,
                                          const KScales& scales, int group) {
    wgmma_fence_operand(group_scores);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      const float score =
          kStacksQTerms ? group_scores[hi_score(i)] + group_scores[lo_score(i)] : group_scores[i];
      const float scale = scales.of(i / 2 % 2, group);
      scores[i] = kStoredRopeDim == 0 && group == 0 ? score * scale : fmaf(score, scale, scores[i]);
    }
  }
};
