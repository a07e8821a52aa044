// The consumers: add the values of all blocks of all items, by their probabilities.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"
#include "common/wgmma_descriptor.cuh"
#include "config.cuh"
#include "mask_v.cuh"
#include "output_dims.cuh"
#include "pipeline/kv_stages.cuh"
#include "pipeline/work_pipeline.cuh"
#include "prepare_q.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "row_sum.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "v_fragments.cuh"

// So many products may be under way.
constexpr int kValueBuffers = 2;

struct PvWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  u32 first;  // its first block, of all
  Accumulators accumulators;
  RowSum row_sum;

  __device__ PvWarpgroup(SharedMemoryPlan& smem, const WorkItem& work, u32 blocks_done)
      : smem(smem), work(work), first(blocks_done) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) accumulators[tile][i] = 0.0f;
    }
  }

  __device__ void rescale(int stage) {
    row_sum.rescale(smem, stage);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const float2 factor =
          *reinterpret_cast<const float2*>(&smem.rescale[stage][row_of(group * 2)]);
      rescale_group(accumulators, group, factor);
    }
  }

  // Begins the products of half of the tokens and one tile of dims.
  __device__ void pv_mma(const Values& values, u32 probabilities, int half, int tile) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const u32 at = (half * kValueTokens + step * 16) * 2;
      wgmma_mma(Fp16{}, accumulators[tile], values + step * 4,
                smem_desc(probabilities + descriptor_step(at)), 1);
    }
    wgmma_commit_group();
  }

  // While one product is under way, the values of the next come and are converted.
  __device__ void pv_gemm(int stage) {
    const u32 probabilities = descriptor_low(shared_address(smem.probabilities[stage]), 16);
    const ValueRows rows(smem.kv[stage]);
    StoredValues stored;
    Values values[kValueBuffers];
    ValueScales scales;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
#pragma unroll
    for (int pv_step = 0; pv_step < kPvSteps; ++pv_step) {
      const int half = token_half_of(pv_step);
      rows.load(stored, pv_step);
      if (pv_step % kDimTiles == 0) rows.load_scales(scales, half);
      if (pv_step >= kValueBuffers) wgmma_wait_group<kValueBuffers - 1>();
      decode_values(values[pv_step % kValueBuffers], stored, scales);
      pv_mma(values[pv_step % kValueBuffers], probabilities, half, dim_tile_of(pv_step));
    }
    row_sum.add(smem, stage);
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
  }

  __device__ void process_block(u32& blocks_done, u32 end) {
    const int stage = stage_of(blocks_done);
    wait(smem.probabilities_full[stage], phase_of(blocks_done));
    if (kPingPong && __any_sync(~0u, blocks_done + 1 != end)) {
      wait(smem.scores_full[stage_of(blocks_done + 1)], phase_of(blocks_done + 1));
    }
    if (__any_sync(~0u, smem.rescales[stage] != 0)) rescale(stage);
    if constexpr (!kIsSparse) clear_masked(stage, blocks_done);  // of a list all rows see all
    pv_gemm(stage);
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_empty[stage]);
    ++blocks_done;
  }

  __device__ void clear_masked(int stage, u32 blocks_done) const {
    const int first_token = (work.first_kv_block + static_cast<int>(blocks_done - first)) * kBlockN;
    const int first_masked = max(work.unmasked_kv_end - first_token, 0);
    const int end = min(work.kv_end - first_token, kBlockN);
    if (first_masked < end) clear_nonfinite(smem, work, smem.kv[stage], first_masked, end);
  }

  // Votes tell compilers that all lanes go on, so that stages and descriptors are theirs in common.
  __device__ void process_work(u32& blocks_done) {
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(blocks_done, end);
  }
};

__device__ inline void pv_loop(const Params& params, SharedMemoryPlan& smem) {
  finish_q_load<kLatentTiles / 2>(smem, smem.first_query_full, reload_tid(), kConsumerThreads);
  u32 blocks_done = 0;  // blocks
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    PvWarpgroup pv_warpgroup(smem, work, blocks_done);
    pv_warpgroup.process_work(blocks_done);
    wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
    pv_warpgroup.row_sum.publish(smem, work_slot(work.work_idx));
    // All have left theirs; and what either consumer has found to be not finite counts for both.
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    ThreadRows rows{smem, work_slot(work.work_idx)};
    epilogue(params, work, smem, pv_warpgroup.accumulators, rows);
    work_idx = work.work_idx + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}
