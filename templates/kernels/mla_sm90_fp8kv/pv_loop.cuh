// PV loop of the PV warpgroups: O^T += V^T P^T for every KV block of every work item.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mask_v.cuh"
#include "output_dims.cuh"
#include "pipeline/kv_stages.cuh"
#include "pipeline/work_pipeline.cuh"
#include "prepare_q.cuh"
#include "ptx/wgmma.cuh"
#include "row_sum.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "v_fragments.cuh"

// Double-buffered V fragments: dequantisation overlaps the MMAs in flight.
constexpr int kVBuffers = 2;

struct PvWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  u32 first_kv_block;  // `blocks_done` at the first KV block of the work item
  Accumulators accumulators;
  RowSum row_sum;

  __device__ PvWarpgroup(SharedMemoryPlan& smem, const WorkItem& work, u32 blocks_done)
      : smem(smem), work(work), first_kv_block(blocks_done) {
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
      const float2 alpha =
          *reinterpret_cast<const float2*>(&smem.rescale[stage][row_of(group * 2)]);
      rescale_group(accumulators, group, alpha);
    }
  }

  // Issues the MMAs of half of the tokens and one tile of dims.
  __device__ void pv_mma(const VFragments& v, u32 p_desc, int half, int tile) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kVSteps; ++step) {
      const u32 p_offset = (half * kVTokens + step * 16) * 2;
      wgmma_mma(Fp16{}, accumulators[tile], v + step * 4,
                smem_desc_sw128(p_desc + descriptor_step(p_offset)), 1);
    }
    wgmma_commit_group();
  }

  // Loads and dequantises the V fragments of a step while the preceding MMAs are in flight.
  __device__ void pv_gemm(int stage) {
    const u32 p_desc = descriptor_low(shared_address(smem.probabilities[stage]), 16);
    const VLoader v_loader(smem.kv[stage]);
    StoredV stored;
    VFragments v[kVBuffers];
    VScales scales;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
#pragma unroll
    for (int pv_step = 0; pv_step < kPvSteps; ++pv_step) {
      const int half = token_half_of(pv_step);
      v_loader.load(stored, pv_step);
      if (pv_step % kDimTiles == 0) v_loader.load_scales(scales, half);
      if (pv_step >= kVBuffers) wgmma_wait_group<kVBuffers - 1>();
      dequant_v(v[pv_step % kVBuffers], stored, scales);
      pv_mma(v[pv_step % kVBuffers], p_desc, half, dim_tile_of(pv_step));
    }
    row_sum.add(smem, stage);
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
  }

  __device__ void process_block(u32& blocks_done, u32 end) {
    const int stage = stage_of(blocks_done);
    wait(smem.probabilities_full[stage], phase_of(blocks_done));
    if (kDelaysPv && __any_sync(~0u, blocks_done + 1 != end)) {
      wait(smem.scores_full[stage_of(blocks_done + 1)], phase_of(blocks_done + 1));
    }
    if (__any_sync(~0u, smem.needs_rescale[stage] != 0)) rescale(stage);
    if constexpr (!kIsSparse) clear_masked(stage, blocks_done);  // top-k tokens: no causal mask
    pv_gemm(stage);
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_empty[stage]);
    ++blocks_done;
  }

  __device__ void clear_masked(int stage, u32 blocks_done) const {
    const int first_token =
        (work.first_kv_block + static_cast<int>(blocks_done - first_kv_block)) * kBlockN;
    const int first_masked = max(work.unmasked_kv_end - first_token, 0);
    const int end = min(work.kv_end - first_token, kBlockN);
    if (first_masked < end) clear_nonfinite(smem, work, smem.kv[stage], first_masked, end);
  }

  // The any-sync makes stages and descriptors warp-uniform.
  __device__ void process_work(u32& blocks_done) {
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(blocks_done, end);
  }
};

__device__ inline void pv_loop(const Params& params, SharedMemoryPlan& smem) {
  finish_q_load<kLatentTiles / 2>(smem, smem.first_query_full, reload_tid(), kConsumerThreads);
  u32 blocks_done = 0;  // KV blocks, over all work items
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    PvWarpgroup pv_warpgroup(smem, work, blocks_done);
    pv_warpgroup.process_work(blocks_done);
    wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
    pv_warpgroup.row_sum.publish(smem, work_slot(work.work_idx));
    // All row sums are published, and a NaN/Inf that either PV warpgroup found counts for both.
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    ThreadRows rows{smem, work_slot(work.work_idx)};
    epilogue(params, work, smem, pv_warpgroup.accumulators, rows);
    work_idx = work.work_idx + 1;  // reloaded, so that the main loop holds no register for it
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}
