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
#include "qk_gemm.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "score_limits.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/online_softmax.cuh"
#include "v_scales.cuh"

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
    QkGemm qk_gemm(scores, k_desc, q_desc);
    const KScales scales(smem.kv[stage], qk_thread);
    thread_scales.select(scales, smem.kv[stage], qk_thread);
    const float shared_scale = smem.shared_scale;
    thread_scales.store(smem.kv[stage], qk_thread, shared_scale);
    softmax.publish_block_scale(qk_thread, stage, false);
    bool exceeds_max_scaled = thread_scales.exceeds_max_scaled(shared_scale);
    const bool is_masked = __any_sync(~0u, needs_mask(stage, first_token));
    qk_gemm.finish(params, scores, scales, thread_scales, smem.kv[stage]);
    if (kDelaysPv && qk_thread.lane == 0) arrive(smem.scores_full[stage]);
    if (kQkConvertsQ && is_last && qk_thread.lane == 0) arrive(smem.query_empty);
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
      process_block(blocks_done - begin, kQkConvertsQ && blocks_done + 1 == end);
    }
    if constexpr (kQkConvertsQ) {
      if (begin == end && reload_lane() == 0) arrive(smem.query_empty);
    } else {
      // All warps are done with Q: they have met at a barrier since its last read, or never read
      // it.
      if (reload_tid() % kQkThreads == 0) arrive(smem.query_empty);
    }
    softmax.publish_row_max(work_slot(work.work_idx));
  }
};

// Converts Q of a work item after the first, whose copies have arrived.
__device__ inline void convert_q_of_qk(SharedMemoryPlan& smem) {
  convert_q(smem, reload_tid() % kQkThreads, kQkThreads);
  named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
}

__device__ inline void qk_loop(const Params& params, SharedMemoryPlan& smem) {
  u32 blocks_done = 0;
  work_loop(smem, [&](const WorkItem& work, u32 work_idx) {
    wait_query(smem, work_idx);
    if (kQkConvertsQ && work_idx > 0) convert_q_of_qk(smem);
    QkWarpgroup qk_warpgroup(params, smem, work, blocks_done);
    qk_warpgroup.process_work();
  });
}
