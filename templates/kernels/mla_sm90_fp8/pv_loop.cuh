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
#include "mma_operands.cuh"
#include "nonfinite_flag.cuh"
#include "output_dims.cuh"
#include "pipeline/kv_stages.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mov.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "v_fragments.cuh"

// The tensor cores keep sums with 13 bits, too few for a long sequence: each block has a sum of its
// own, which is added in fp32.
using BlockAccumulators = float[kBlockM / 2];

struct PvWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  Accumulators accumulators;

  __device__ PvWarpgroup(SharedMemoryPlan& smem, const WorkItem& work) : smem(smem), work(work) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) accumulators[tile][i] = 0.0f;
    }
  }

  // By the factors that warps of the scorer have left; others have left none.
  __device__ void rescale(int stage, u32 rescales) {
    const float* alpha = &smem.rescale[stage][row_of(0)];
#pragma unroll
    for (int warp = 0; warp < kWarpsWithRows; ++warp) {
      if (!__any_sync(~0u, (rescales >> warp * 8 & 0xff) != 0)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int group = warp * 2 + half;
        rescale_group(accumulators, group, make_float2(alpha[group * 8], alpha[group * 8 + 1]));
      }
    }
  }

  // Begins the product of one tile of dims.
  __device__ static void pv_gemm_tile(Values& values, u32 probabilities,
                                      BlockAccumulators& block_acc) {
    wgmma_fence_operand(block_acc);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) wgmma_fence_operand(values[k]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_mma(E4m3{}, block_acc, values[k],
                descriptor_64(probabilities + descriptor_step(k * kStepElements)), k > 0);
    }
    wgmma_commit_group();
  }

  __device__ void accumulate_block(BlockAccumulators& block_acc, int tile) {
    wgmma_wait_group<0>();
    wgmma_fence_operand(block_acc);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) accumulators[tile][i] += block_acc[i];
    wgmma_fence_operand(accumulators[tile]);  // added here, not when all sums have come
  }

  // `values` are those of tile 0. What was before the block is multiplied by factors while its
  // first product is under way, for that is a sum of its own.
  __device__ void pv_gemm(const ValueRows& rows, Values& values, u32 probabilities, int stage,
                          u32 rescales) {
    BlockAccumulators block_acc;
    pv_gemm_tile(values, probabilities, block_acc);
    if (__any_sync(~0u, rescales != 0)) rescale(stage, rescales);
#pragma unroll
    for (int tile = 1; tile < kDimTiles; ++tile) {
      accumulate_block(block_acc, tile - 1);
      rows.load(values, tile);
      pv_gemm_tile(values, probabilities, block_acc);
    }
    accumulate_block(block_acc, kDimTiles - 1);
  }

  // Of the block that is the first of the `num_remaining` that are left of the item.
  __device__ void clear_values(const ValueRows& rows, int num_remaining) {
    const int first_token = (work.first_kv_block + work.num_kv_blocks - num_remaining) * kBlockN;
    const int first = work.unmasked_kv_end - first_token;
    if (rows.clear_nan(smem, first, work.kv_end - first_token)) {
      nonfinite_flag(smem, work) = 1;
    }
    fence_proxy_async();  // tokens are copied to the same place
    __syncwarp();
  }

  // From block number `first_masked` on, some row does not see all tokens.
  __device__ void process_block(u32& blocks_done, u32 first_masked, u32 end) {
    const int stage = stage_of(blocks_done);
    const u32 phase = phase_of(blocks_done);
    wait(smem.kv_full[stage], phase);
    const u32 address = shared_address(smem.kv[0]) + stage * kKvBlockBytes;
    const ValueRows rows(address);
    Values values;
    // The first values are in registers when probabilities come. Once they have, nobody needs the
    // tokens as they are.
    rows.load(values, 0);
    wait(smem.probabilities_full[stage], phase);
    const u32 rescales = smem.rescales[stage];
    if (__any_sync(~0u, blocks_done >= first_masked)) {
      clear_values(rows, end - blocks_done);
      rows.load(values, 0);
    }
    pv_gemm(rows, values, operand_at(address + kProbabilitiesOffset), stage, rescales);
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_empty[stage_of(blocks_done)]);
    ++blocks_done;
  }

  // Blocks that all rows see whole come first. The loop ends by a vote, and blocks are counted by
  // `blocks_done` alone: what depends on it is then in registers of the whole warp.
  __device__ void process_work(u32& blocks_done) {
    const int unmasked =
        min(work.unmasked_kv_end / kBlockN - work.first_kv_block, work.num_kv_blocks);
    const u32 first_masked = blocks_done + warp_uniform(max(unmasked, 0));
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(blocks_done, first_masked, end);
  }
};

__device__ inline void pv_loop(const Params& params, SharedMemoryPlan& smem) {
  finish_q_load(smem.first_query_full);
  u32 blocks_done = 0;  // blocks
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    if (smem.work_items[work_slot(work_idx)].seq_idx < 0) return;
    mov_b32(work_idx);  // else the address of the request is kept meanwhile
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    PvWarpgroup pv_warpgroup(smem, work);
    pv_warpgroup.process_work(blocks_done);
    wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
    // What either consumer has found to be not finite counts for both.
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    ThreadRows rows{smem, work_slot(work.work_idx)};
    epilogue(params, work, smem, pv_warpgroup.accumulators, rows);
    work_idx = work.work_idx + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}
