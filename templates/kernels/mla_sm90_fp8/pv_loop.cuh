// PV loop of the PV warpgroups: O^T += V^T P^T for every KV block of every work item.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "combine/fixed_splits.cuh"
#include "common/barriers.cuh"
#include "common/fp8.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/sync.cuh"
#include "ptx/warp_matrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "thread_rows.cuh"

// V fragments: the A operand, transposed from shared memory into registers.
constexpr int kPvSteps = kBlockN / kStepElements;  // MMAs per KV block and tile of dims
using VFragments = u32[kPvSteps][4];

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 2g and 2g + 1
// of tokens 2c and 2c + 1. After the byte permutation a word holds four of 16 tokens of one dim, in
// the order of P: 2c, 2c + 8, 2c + 1, 2c + 9.
struct VLoader {
  u32 address;  // of this lane's row, at the warp's dims of tile 0

  // `stage` is the shared address of the KV block.
  __device__ explicit VLoader(u32 stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    address = stage + warp / 4 * (kLatentTiles / 2) * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 4);
  }

  // A tile of dims is half a row, four chunks, so `tile % 2` is one bit of the swizzled address.
  __device__ u32 row_address(int tile) const {
    return (address ^ (tile % 2 * 64)) + tile / 2 * kTileBytes;
  }

  __device__ void load(VFragments& v, int tile) const {
    const u32 row = row_address(tile);
#pragma unroll
    for (int k = 0; k < kPvSteps; ++k) {
      u32 loaded[4];
      ldmatrix_x4_trans(loaded, row + k * kStepElements * kTileRowBytes);
      v[k][0] = __byte_perm(loaded[0], loaded[1], 0x6240);
      v[k][1] = __byte_perm(loaded[0], loaded[1], 0x7351);
      v[k][2] = __byte_perm(loaded[2], loaded[3], 0x6240);
      v[k][3] = __byte_perm(loaded[2], loaded[3], 0x7351);
    }
  }

  // Clears NaN in this lane's rows of the KV block, in tokens from `first` on and the dims that
  // only this warp reads. Returns whether any row attends to such a token, that is, one before
  // `num_attended`.
  __device__ bool clear_nan(SharedMemoryPlan& smem, int first, int num_attended) const {
    bool has_attended_nan = false;
#pragma unroll 1
    for (int i = 0; i < kPvSteps * kDimTiles; ++i) {
      const int tile = i / kPvSteps;
      const int token = i % kPvSteps * kStepElements + reload_lane();
      if (token < first) continue;
      const u32 chunk_address = row_address(tile) + i % kPvSteps * kStepElements * kTileRowBytes;
      uint4& dims =
          *reinterpret_cast<uint4*>(smem.kv[0] + (chunk_address - shared_address(smem.kv[0])));
      const uint4 loaded = dims;
      const uint4 cleared = {loaded.x & ~nan_bytes(loaded.x), loaded.y & ~nan_bytes(loaded.y),
                             loaded.z & ~nan_bytes(loaded.z), loaded.w & ~nan_bytes(loaded.w)};
      const u32 differs = (loaded.x ^ cleared.x) | (loaded.y ^ cleared.y) | (loaded.z ^ cleared.z) |
                          (loaded.w ^ cleared.w);
      if (differs == 0) continue;
      dims = cleared;
      has_attended_nan |= token < num_attended;
    }
    return has_attended_nan;
  }
};

// FP8 MMAs accumulate with 13 bits, too few for a long sequence (two-level accumulation, as in
// DeepGEMM): each KV block has accumulators of its own, promoted into fp32 ones.
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

  // Rescales O by alpha, for the rows of the QK warps whose flag is set; others stored no alpha.
  __device__ void rescale(int stage, u32 rescale_flags) {
    const float* alpha = &smem.alpha[stage][row_of(0)];
#pragma unroll
    for (int warp = 0; warp < kWarpsWithRows; ++warp) {
      if (!__any_sync(~0u, (rescale_flags >> warp * 8 & 0xff) != 0)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int group = warp * 2 + half;
        rescale_group(accumulators, group, make_float2(alpha[group * 8], alpha[group * 8 + 1]));
      }
    }
  }

  // Issues the PV GEMM of one tile of dims.
  __device__ static void pv_gemm_tile(VFragments& v, u32 p_desc, BlockAccumulators& block_acc) {
    wgmma_fence_operand(block_acc);
#pragma unroll
    for (int k = 0; k < kPvSteps; ++k) wgmma_fence_operand(v[k]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPvSteps; ++k) {
      wgmma_mma(E4m3{}, block_acc, v[k],
                smem_desc_sw64(p_desc + descriptor_step(k * kStepElements)), k > 0);
    }
    wgmma_commit_group();
  }

  __device__ void accumulate_block(BlockAccumulators& block_acc, int tile) {
    wgmma_wait_group<0>();
    wgmma_fence_operand(block_acc);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) accumulators[tile][i] += block_acc[i];
    wgmma_fence_operand(accumulators[tile]);  // keeps the addition here, beside the next MMA
  }

  // `v` holds the V fragments of tile 0. The rescale of O overlaps the first MMAs, which do not
  // touch the fp32 accumulators.
  __device__ void pv_gemm(const VLoader& v_loader, VFragments& v, u32 p_desc, int stage,
                          u32 rescale_flags) {
    BlockAccumulators block_acc;
    pv_gemm_tile(v, p_desc, block_acc);
    if (__any_sync(~0u, rescale_flags != 0)) rescale(stage, rescale_flags);
#pragma unroll
    for (int tile = 1; tile < kDimTiles; ++tile) {
      accumulate_block(block_acc, tile - 1);
      v_loader.load(v, tile);
      pv_gemm_tile(v, p_desc, block_acc);
    }
    accumulate_block(block_acc, kDimTiles - 1);
  }

  // Clears NaN in the KV block that is the first of the last `num_remaining` of the work item.
  __device__ void clear_nan_v(const VLoader& v_loader, int num_remaining) {
    const int first_token = (work.first_kv_block + work.num_kv_blocks - num_remaining) * kBlockN;
    const int first = work.unmasked_kv_end - first_token;
    if (v_loader.clear_nan(smem, first, work.kv_end - first_token)) {
      nonfinite_flag(smem, work) = 1;
    }
    fence_proxy_async();  // TMA overwrites the stage later
    __syncwarp();
  }

  // KV blocks from `first_masked` on, counted as `blocks_done`, need a mask for some row.
  __device__ void process_block(u32& blocks_done, u32 first_masked, u32 end) {
    const int stage = stage_of<kStages>(blocks_done);
    const u32 phase = phase_of<kStages>(blocks_done);
    wait(smem.kv_full[stage], phase);
    const u32 address = shared_address(smem.kv[0]) + stage * kKvStageBytes;
    const VLoader v_loader(address);
    VFragments v;
    // The first V fragments are in registers before P arrives. Once it has, the QK warpgroup no
    // longer reads the KV block, and NaN may be cleared in place.
    v_loader.load(v, 0);
    wait(smem.probabilities_full[stage], phase);
    const u32 rescale_flags = smem.rescale_flags[stage];
    if (__any_sync(~0u, blocks_done >= first_masked)) {
      clear_nan_v(v_loader, end - blocks_done);
      v_loader.load(v, 0);
    }
    pv_gemm(v_loader, v, descriptor_low(address + kProbabilitiesOffset), stage, rescale_flags);
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_empty[stage_of<kStages>(blocks_done)]);
    ++blocks_done;
  }

  // Unmasked KV blocks come first. The any-sync and the single counter `blocks_done` make stages
  // and addresses warp-uniform, so they live in uniform registers.
  __device__ void process_work(u32& blocks_done) {
    const int unmasked =
        min(work.unmasked_kv_end / kBlockN - work.first_kv_block, work.num_kv_blocks);
    const u32 first_masked = blocks_done + warp_uniform(max(unmasked, 0));
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(blocks_done, first_masked, end);
  }
};

// PV warps load the first Q themselves: they have no other work before it arrives.
__device__ inline void pv_loop(const Params& params, const WorkCoord& first_work,
                               SharedMemoryPlan& smem) {
  load_q_async(params, first_work, smem, static_cast<int>(threadIdx.x), kPvThreads);
  finish_q_load(smem.first_query_full);
  u32 blocks_done = 0;  // KV blocks, over all work items
  pv_work_loop<true>(params, smem, [&](const WorkItem& work, u32) {
    PvWarpgroup pv_warpgroup(smem, work);
    pv_warpgroup.process_work(blocks_done);
    wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
    // A NaN that either PV warpgroup found counts for both.
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
    ThreadRows rows{smem, work_slot(work.work_idx)};
    epilogue(params, work, smem, pv_warpgroup.accumulators, rows);
  });
}
