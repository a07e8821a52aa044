// QK loop of a QK warpgroup beside PV warpgroups that have the softmax: S^T = K Q^T for all KV
// blocks of all work items.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "load_query.cuh"
#include "pipeline/work_pipeline.cuh"
#include "qk_gemm.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "score_limits.cuh"
#include "scores_smem.cuh"
#include "shared_memory.cuh"
#include "v_scales.cuh"

struct QkWarpgroup {
  SharedMemoryPlan& smem;
  u32& blocks_done;  // KV blocks, over all work items

  __device__ void process_block(bool is_last) {
    const int stage = stage_of<kStages>(blocks_done);
    const u32 k_desc = warp_uniform(descriptor_low(shared_address(smem.kv[stage])));
    const u32 q_desc = warp_uniform(descriptor_low(shared_address(smem.query)));
    const QkThread qk_thread;
    Scores scores;
    wait(smem.kv_full[stage], phase_of<kStages>(blocks_done));
    const KScales scales(smem.kv[stage], qk_thread);
    QkGemm{k_desc, q_desc}.compute(scores, scales, smem.kv[stage]);
    if (is_last && qk_thread.lane == 0) arrive(smem.query_empty);
    wait(smem.scores_empty, phase_of<1>(blocks_done) ^ 1);
    store_scores(smem, scores, qk_thread);
    __syncwarp();
    if (qk_thread.lane == 0) arrive(smem.scores_full[stage]);
    ++blocks_done;
  }

  __device__ void process_work(int num_kv_blocks) {
    const u32 end = blocks_done + warp_uniform(num_kv_blocks);
    if (num_kv_blocks == 0 && reload_lane() == 0) arrive(smem.query_empty);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(blocks_done + 1 == end);
  }
};

__device__ inline void qk_loop(const Params&, SharedMemoryPlan& smem) {
  u32 blocks_done = 0;
  work_loop(smem, [&](const WorkItem& work, u32 work_idx) {
    wait_query(smem, work_idx);
    if (work_idx > 0) {
      convert_q(smem, work_slot(work_idx), reload_tid() % kQkThreads, kQkThreads);
      named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
    }
    QkWarpgroup qk_warpgroup{smem, blocks_done};
    qk_warpgroup.process_work(work.num_kv_blocks);
    if (kBatchInvariant && reload_lane() == 0) arrive(smem.row_state_full[work_slot(work_idx)]);
  });
}
