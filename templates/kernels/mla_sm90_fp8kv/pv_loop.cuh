// PV loop of the PV warpgroups: O^T += V^T P^T for every KV block of every work item.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "combine/fixed_splits.cuh"
#include "combine/partial.cuh"
#include "combine/row_scale.cuh"
#include "common/barriers.cuh"
#include "common/fp8.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "dequant.cuh"
#include "load_query.cuh"
#include "ptx/cvt.cuh"
#include "ptx/wgmma.cuh"
#include "pv_block_softmax.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"
#include "thread_rows.cuh"
#include "v_scales.cuh"

// Row sum l, computed by the PV warpgroups, which are less loaded than the QK warpgroup: every
// thread sums some tokens of one row of P.
constexpr int kBytesPerThread = kTileRowBytes / kThreadsPerRow;  // of a row of P

struct RowSum {
  float row_sum = 0.0f;  // over this thread's tokens, times the shared scale as O is

  __device__ static int row() { return reload_tid() / kThreadsPerRow; }

  // Adds P of the KV block in `stage`; P is in `buffer`.
  __device__ void add(const SharedMemoryPlan& smem, int stage, int buffer) {
    const int first = reload_tid() % kThreadsPerRow * kBytesPerThread;
    float sum = 0.0f;
#pragma unroll
    for (int byte_offset = 0; byte_offset < kBytesPerThread; byte_offset += sizeof(uint2)) {
      const int byte = first + byte_offset;
      const u32 offset = swizzled_offset<kTileRowBytes>(row(), byte / kChunkBytes);
      const uint2 loaded =
          *reinterpret_cast<const uint2*>(smem.probabilities[buffer] + offset + byte % kChunkBytes);
      sum += sum_of_pair(loaded.x) + sum_of_pair(loaded.y);
    }
    row_sum = fmaf(sum, shared_scale_of(smem, stage), row_sum);
  }

  __device__ static float sum_of_pair(u32 pair) {
    return cvt_f32(Fp16{}, static_cast<u16>(pair)) + cvt_f32(Fp16{}, static_cast<u16>(pair >> 16));
  }

  __device__ void rescale(const SharedMemoryPlan& smem, int stage) {
    row_sum *= smem.alpha[stage][row()];
  }

  // Reduces over the threads of a row, of which one publishes row sum and scale. With the softmax
  // in this warpgroup, it has stored the row max.
  __device__ void publish(const Params& params, const WorkItem& work,
                          SharedMemoryPlan& smem) const {
    const int stage = work_slot(work.work_idx);
    float sum = row_sum;
#pragma unroll
    for (int lanes = 1; lanes < kThreadsPerRow; lanes *= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (reload_tid() % kThreadsPerRow != 0) return;
    smem.row_sum[stage][row()] = sum;
    // |O| <= l * max |V|.
    const float amax = sum * inverse_of_pow2(last_shared_scale(smem, stage)) * kMaxV;
    const RowState state = {smem.row_max[stage][row()], sum};
    smem.row_scale[stage][row()] = row_scale_of(params, work, row(), state, amax);
  }
};

// Called by all PV threads. Clears non-finite V elements and scales of the tokens from `first` to
// `end` of the KV block at `stage`. Some row attends to these tokens, so a NaN/Inf sets the flag
// and the epilogue restores it.
__device__ inline void clear_nonfinite(SharedMemoryPlan& smem, const WorkItem& work,
                                       unsigned char* stage, int first, int end) {
  constexpr int kTokenPairs = kLatentDim / 2;
#pragma unroll 1
  for (int i = reload_tid(); i < (end - first) * kTokenPairs; i += kPvThreads) {
    const int token = first + i / kTokenPairs;
    const int dim = i % kTokenPairs * 2;
    u16& scale = v_scale(stage, token, dim / kScaledDims);
    const u32 row = dim / kTileRowBytes * kTileBytes +
                    swizzled_offset<128>(token, dim % kTileRowBytes / kChunkBytes);
    u16& stored = *reinterpret_cast<u16*>(stage + row + dim % kChunkBytes);
    const bool is_scale_finite = (scale & 0x7c00) != 0x7c00;
    const u32 finite = stored & ~nan_bytes(stored);
    if (is_scale_finite && finite == stored) continue;
    stored = static_cast<u16>(finite);
    if (!is_scale_finite) scale = 0;
    nonfinite_flag(smem, work) = 1;
  }
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
}

// Batch-invariant PV warps with the softmax have no registers to spare between MMAs: they add P to
// the row sum before the PV GEMM, and V scales are not live from one KV block to the next.
constexpr bool kAddsPFirst = kPvHasSoftmax && kBatchInvariant;

// Double-buffered V fragments: dequantization overlaps the MMAs in flight.
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
      const float2 alpha = *reinterpret_cast<const float2*>(&smem.alpha[stage][row_of(group * 2)]);
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

  // The same with a rope part in V: the last warp has no codes. Both paths of a step end before its
  // MMAs, which all warps issue together.
  __device__ void pv_gemm_with_rope(int stage, int buffer) {
    const u32 p_desc = probabilities_desc(smem, buffer);
    const VLoader v_loader(smem.kv[stage], v_scales_at(smem, stage, buffer));
    const RopeVLoader rope_loader(smem.kv[stage], shared_scale_of(smem, stage));
    const bool has_rope = __any_sync(~0u, reload_warp() == kPvWarps - 1);
    RopeVLoader::Stored stored_rope;
    StoredV stored;
    VFragments v[kVBuffers];
    VScales scales;
    if constexpr (kAddsPFirst) scales[0] = scales[1] = {0, 0};  // not set on the path of rope
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
#pragma unroll
    for (int pv_step = 0; pv_step < kPvSteps; ++pv_step) {
      const int half = token_half_of(pv_step);
      VFragments& fragments = v[pv_step % kVBuffers];
      if (has_rope) {
        rope_loader.load(stored_rope, pv_step);
        if (pv_step >= kVBuffers) wgmma_wait_group<kVBuffers - 1>();
        rope_loader.dequant(fragments, stored_rope);
      } else {
        v_loader.load(stored, pv_step);
        v_loader.load_scales(scales, pv_step);
        if (pv_step >= kVBuffers) wgmma_wait_group<kVBuffers - 1>();
        dequant_v(fragments, stored, scales);
      }
      __syncwarp();
      pv_mma(fragments, p_desc, half, dim_tile_of(pv_step));
    }
    if constexpr (!kAddsPFirst) row_sum.add(smem, stage, buffer);
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
  }

  // Loads and dequantizes the V fragments of a step while the preceding MMAs are in flight.
  __device__ void pv_gemm(int stage, int buffer) {
    const u32 p_desc = probabilities_desc(smem, buffer);
    const VLoader v_loader(smem.kv[stage], v_scales_at(smem, stage, buffer));
    StoredV stored;
    VFragments v[kVBuffers];
    VScales scales;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
#pragma unroll
    for (int pv_step = 0; pv_step < kPvSteps; ++pv_step) {
      const int half = token_half_of(pv_step);
      v_loader.load(stored, pv_step);
      v_loader.load_scales(scales, pv_step);
      if (pv_step >= kVBuffers) wgmma_wait_group<kVBuffers - 1>();
      dequant_v(v[pv_step % kVBuffers], stored, scales);
      pv_mma(v[pv_step % kVBuffers], p_desc, half, dim_tile_of(pv_step));
    }
    if constexpr (!kAddsPFirst) row_sum.add(smem, stage, buffer);
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
  }

  __device__ void process_block(const Params& params, u32& blocks_done, u32 end) {
    const int stage = stage_of<kStages>(blocks_done);
    const int buffer = stage_of<kPBuffers>(blocks_done);
    if (__any_sync(~0u, finish_softmax(params, smem, work, blocks_done, end))) {
      rescale(stage);
    }
    if constexpr (kAddsPFirst) row_sum.add(smem, stage, buffer);
    if constexpr (!kIsSparse) clear_masked(stage, blocks_done);  // top-k tokens: no causal mask
    if constexpr (kHasRopeInV) {
      pv_gemm_with_rope(stage, buffer);
    } else {
      pv_gemm(stage, buffer);
    }
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
  __device__ void process_work(const Params& params, u32& blocks_done) {
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(params, blocks_done, end);
  }
};

// PV warps load the first Q themselves: they have no other work before it arrives.
__device__ inline void pv_loop(const Params& params, const WorkCoord& first_work,
                               SharedMemoryPlan& smem) {
  load_first_q(params, first_work, smem, smem.first_query_full, static_cast<int>(threadIdx.x));
  u32 blocks_done = 0;  // KV blocks, over all work items
  pv_work_loop<kStoredRopeDim == 0 || kPvHasSoftmax || kBatchInvariant>(
      params, smem, [&](const WorkItem& work, u32) {
        PvWarpgroup pv_warpgroup(smem, work, blocks_done);
        pv_warpgroup.process_work(params, blocks_done);
        finish_row_max(smem, work);
        pv_warpgroup.row_sum.publish(params, work, smem);
        // All row sums are published, and a NaN/Inf that either PV warpgroup found counts for both.
        named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
        ThreadRows rows{smem, work_slot(work.work_idx)};
        epilogue(params, work, smem, pv_warpgroup.accumulators, rows);
      });
}
