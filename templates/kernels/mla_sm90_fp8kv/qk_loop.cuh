// QK loop of the QK warpgroup: S^T = K Q^T and online softmax for all KV blocks of all work items.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "load_query.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/online_softmax.cuh"
#include "v_scales.cuh"

// K dimension of an FP8 MMA.
constexpr int kStepElements = 32;
constexpr int kHalfTileBytes = kTileRowBytes / 2;  // hi terms, then lo terms of a rope row

// Q of a scale group: hi terms in a tile, lo terms in the next one, or a row of both in one tile.
// Interleaved ones are read as rows of 64 bytes each.
constexpr int kQueryGroupBytes = kNumQTerms * kQueryTileBytes * kScaledDims / kTileRowBytes;
constexpr int kQueryLoOffset = kScaledDims < kTileRowBytes ? kHalfTileBytes : kQueryTileBytes;
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

struct QkWarpgroup {
  const Params& params;
  SharedMemoryPlan& smem;
  const WorkItem& work;
  u32& blocks_done;  // KV blocks, over all work items
  Scores scores;
  ThreadScales thread_scales;
  Softmax softmax;

  __device__ QkWarpgroup(const Params& params, SharedMemoryPlan& smem, const WorkItem& work,
                         u32& blocks_done)
      : params(params), smem(smem), work(work), blocks_done(blocks_done), softmax(smem) {}

  // Issues the QK GEMM over the dims of one scale group.
  __device__ static void qk_gemm_group(GroupScores& group_scores, u32 k_desc, u32 q_desc,
                                       int group) {
    k_desc += descriptor_step(group * kGroupTileBytes);
    q_desc += descriptor_step(group * kQueryGroupBytes);
    wgmma_fence_operand(group_scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kScaledDims / kStepElements; ++k) {
      const u32 k_offset = descriptor_step(k * kStepElements);
      const u64 k_smem_desc = smem_desc<kScaledDims>(k_desc + k_offset);
      wgmma_mma(E4m3{}, group_scores, k_smem_desc, smem_desc<kQueryRowBytes>(q_desc + k_offset),
                k > 0);
      if constexpr (kSplitsQ && !kStacksQTerms) {
        const u32 q_lo = q_desc + k_offset + descriptor_step(kQueryLoOffset);
        wgmma_mma(E4m3{}, group_scores, k_smem_desc, smem_desc<kQueryRowBytes>(q_lo), 1);
      }
    }
    wgmma_commit_group();
  }

  // Issues the QK GEMM over the rope part.
  __device__ void qk_gemm_rope(u32 k_desc, u32 q_desc) {
    k_desc += descriptor_step(kRopeTileOffset);
    q_desc += descriptor_step(kCodeTiles * kQueryTileBytes);
    wgmma_fence_operand(scores);
    wgmma_fence();
    if constexpr (kHasBf16Rope) {
#pragma unroll
      for (int k = 0; k < kStoredRopeDim / 16; ++k) {
        const u32 k_offset = descriptor_step(k * 32);
        wgmma_mma(Bf16{}, scores, smem_desc_sw128(k_desc + k_offset),
                  smem_desc_sw128(q_desc + k_offset), k > 0);
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

  // A bf16 rope part may have no scale.
  __device__ void scale_rope(const KScales& scales) {
    wgmma_fence_operand(scores);
    if constexpr (kHasBf16Rope && !KvRow::kScalesBf16) return;
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      scores[i] *= kHasPerTokenScale ? scales.of(i / 2 % 2, 0) : params.rope_scale;
    }
  }

  // Promotes the scores of a scale group into `scores`, times the K scales of tokens g and g + 8.
  // Without a rope part, the first group overwrites them.
  __device__ void add_scaled_group(GroupScores& group_scores, const KScales& scales, int group) {
    wgmma_fence_operand(group_scores);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      const float score =
          kStacksQTerms ? group_scores[hi_score(i)] + group_scores[lo_score(i)] : group_scores[i];
      const float scale = scales.of(i / 2 % 2, group);
      scores[i] = kStoredRopeDim == 0 && group == 0 ? score * scale : fmaf(score, scale, scores[i]);
    }
  }

  // Promotes the scale groups from `kGroup` on, and refills the MMAs in flight. While they are,
  // takes a part of the rope elements for the shared scale of V.
  template <int kGroup>
  __device__ void add_groups(GroupScores (&pending_scores)[kGroupsInFlight], const KScales& scales,
                             u32 k_desc, u32 q_desc) {
    constexpr int kRemaining = kScaleGroups - 1 - kGroup;
    constexpr int kNext = kGroup + kGroupsInFlight;
    wgmma_wait_group<(kRemaining < kGroupsInFlight ? kRemaining : kGroupsInFlight - 1)>();
    GroupScores& group_scores = pending_scores[kGroup % kGroupsInFlight];
    add_scaled_group(group_scores, scales, kGroup);
    if constexpr (kNext < kScaleGroups) qk_gemm_group(group_scores, k_desc, q_desc, kNext);
    if constexpr (kHasRopeInV) thread_scales.add_rope(kGroup);
    if constexpr (kRemaining > 0) add_groups<kGroup + 1>(pending_scores, scales, k_desc, q_desc);
  }

  // Masks the scores of tokens g and g + 8 for which `is_masked(r, offset)`. A select, not an
  // addition: a masked score may be NaN. Times the score scale once more, the score is minus
  // infinity, whatever the sign of the scale.
  template <typename IsMasked>
  __device__ void mask_scores(const QkThread& qk_thread, IsMasked is_masked) {
    const ThreadRowPairs rows(smem, qk_thread);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float masked = rows.of_group(r / 2).score_scale(r % 2) * -kInfinity;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_masked(r, half * 8)) scores[r / 2 * 4 + half * 2 + r % 2] = masked;
      }
    }
  }

  __device__ void mask_by_kv_len(int first_token, const QkThread& qk_thread) {
    const int token = first_token + qk_thread.token();
    mask_scores(qk_thread,
                [&](int r, int offset) { return token + offset >= work.row_kv_end[row_of(r)]; });
  }

  __device__ void mask_invalid(u64 invalid_mask, const QkThread& qk_thread) {
    const u64 bits = invalid_mask >> qk_thread.token();
    mask_scores(qk_thread, [&](int, int offset) { return (bits >> offset & 1) != 0; });
  }

  // Whether any token of the KV block in `stage` is masked for any row.
  __device__ bool needs_mask(int stage, int first_token) const {
    if constexpr (kIsSparse) return smem.invalid_mask[stage].all() != 0;
    return first_token + kBlockN > work.unmasked_kv_end;
  }

  // `index` counts the KV blocks of the work item. What does not depend on the scores precedes the
  // wait for the MMAs: the step from S to P is the critical path of the CTA.
  __device__ void process_block(u32 index, bool is_last) {
    const int stage = stage_of<kStages>(blocks_done);
    const u32 k_desc = warp_uniform(descriptor_low(shared_address(smem.kv[stage])));
    const u32 q_desc = warp_uniform(descriptor_low(shared_address(smem.query)));
    const QkThread qk_thread;
    const int first_token = (work.first_kv_block + static_cast<int>(index)) * kBlockN;
    wait(smem.kv_full[stage], phase_of<kStages>(blocks_done));
    fence_proxy_async();  // wgmma reads what cp.async has written
    GroupScores pending_scores[kGroupsInFlight];
    if constexpr (kStoredRopeDim > 0) qk_gemm_rope(k_desc, q_desc);
#pragma unroll
    for (int group = 0; group < kGroupsInFlight; ++group) {
      qk_gemm_group(pending_scores[group], k_desc, q_desc, group);
    }
    const KScales scales(smem.kv[stage], qk_thread);
    thread_scales.select(scales, smem.kv[stage], qk_thread);
    const float shared_scale = smem.shared_scale;
    thread_scales.store(smem.kv[stage], qk_thread, shared_scale);
    softmax.publish_block_scale(qk_thread, stage, false);
    bool exceeds_max_scaled = thread_scales.exceeds_max_scaled(shared_scale);
    const bool is_masked = __any_sync(~0u, needs_mask(stage, first_token));
    if constexpr (kStoredRopeDim > 0) {
      wgmma_wait_group<kGroupsInFlight>();
      scale_rope(scales);
    }
    add_groups<0>(pending_scores, scales, k_desc, q_desc);
    if (kDelaysPv && qk_thread.lane == 0) arrive(smem.scores_full[stage]);
    if (kQkSplitsQ && is_last && qk_thread.lane == 0) arrive(smem.query_empty);
    if (is_masked) {
      if constexpr (kIsSparse) {
        mask_invalid(smem.invalid_mask[stage].all(), qk_thread);
      } else {
        mask_by_kv_len(first_token, qk_thread);
      }
    }
    if constexpr (kHasRopeInV) {
      exceeds_max_scaled |= thread_scales.rope_exceeds_max_scaled(shared_scale);
    }
    softmax.update(scores, thread_scales, qk_thread, stage, index == 0, exceeds_max_scaled);
    ++blocks_done;
  }

  __device__ void process_work() {
    softmax.begin(score_scale(params) * (kLog2E / kKScaleFactor));
    const u32 begin = blocks_done;
    const u32 end = begin + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) {
      process_block(blocks_done - begin, kQkSplitsQ && blocks_done + 1 == end);
    }
    if constexpr (kQkSplitsQ) {
      if (begin == end && reload_lane() == 0) arrive(smem.query_empty);
    } else {
      // All warps are done with Q: they have met at a barrier since its last read, or never read
      // it.
      if (reload_tid() % kQkThreads == 0) arrive(smem.query_empty);
    }
    softmax.publish_row_max(work_slot(work.work_idx));
  }
};

// Splits Q of a work item after the first, whose copies have arrived.
__device__ inline void split_q_of_qk(SharedMemoryPlan& smem) {
  if constexpr (kQkSplitsQ) {
    split_q<kCodeTiles>(smem, reload_tid() % kQkThreads, kQkThreads);
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
  }
}

__device__ inline void qk_loop(const Params& params, SharedMemoryPlan& smem) {
  u32 blocks_done = 0;
  work_loop(smem, [&](const WorkItem& work, u32 work_idx) {
    wait_query(smem, work_idx);
    if (kQkSplitsQ && work_idx > 0) split_q_of_qk(smem);
    QkWarpgroup qk_warpgroup(params, smem, work, blocks_done);
    qk_warpgroup.process_work();
  });
}
