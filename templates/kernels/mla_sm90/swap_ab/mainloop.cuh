// Mainloop, swap-AB: S^T = K Q^T, online softmax over the tokens, O^T += V^T P^T.

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
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "ptx/sync.cuh"
#include "ptx/warp_matrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/work_rows.cuh"
#include "thread_rows.cuh"

// M of the MMAs is tokens (S^T) or output dims (O^T), and N is query rows: M is 64 at least, so
// that few rows would leave a normal MMA mostly idle. A warp has 16 tokens of S^T.
using Scores = float[kBlockM / 2];

// Lower word of the descriptors of `tiles`, in a uniform register: otherwise each MMA moves its
// descriptors there.
__device__ inline u32 uniform_desc(const void* tiles) {
  return warp_uniform(descriptor_low(shared_address(tiles)));
}

struct Consumer {
  const Params& params;
  SharedMemoryPlan& smem;
  const WorkItem& work;
  float scale;  // from scores to the log2 domain
  PipelineState<kStages>& pipe;
  u32& p_buffer;  // of P
  Accumulators accumulators;
  Scores scores;
  float row_sum[kRowsPerThread];  // over this thread's tokens
  float row_max[kRowsPerThread];  // stale maximum, log2 domain, the same in all warps

  __device__ Consumer(const Params& params, SharedMemoryPlan& smem, const WorkItem& work,
                      float scale, PipelineState<kStages>& pipe, u32& p_buffer)
      : params(params), smem(smem), work(work), scale(scale), pipe(pipe), p_buffer(p_buffer) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      set_accumulator(accumulators, i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      row_sum[r] = 0.0f;
      row_max[r] = -kFloatMax;
    }
  }

  __device__ void release(const Barrier& barrier) const {
    if (reload_tid() == 0) arrive(barrier);
  }

  // Pipeline index of a stage of the current KV block, which qk_gemm has advanced past.
  __device__ int pipe_stage(int stage_in_block) const {
    const int stage = pipe.index - kStagesPerBlock + stage_in_block;
    return stage < 0 ? stage + kStages : stage;
  }

  __device__ unsigned char* tile(int index) const {
    return smem.kv[pipe_stage(index / kTilesPerStage)] + index % kTilesPerStage * kTileBytes;
  }

  // Issues the MMAs of each stage as it arrives.
  __device__ void qk_gemm() {
    wgmma_fence_operand(scores);
#pragma unroll
    for (int stage_in_block = 0; stage_in_block < kStagesPerBlock; ++stage_in_block) {
      wait(smem.kv_full[pipe.index], pipe.phase);
      if constexpr (kIsSparse) fence_proxy_async();  // wgmma reads what cp.async has written
      const u32 query_desc = uniform_desc(smem.query);
      const u32 stage_desc = uniform_desc(smem.kv[pipe.index]);
      pipe.advance();
      wgmma_fence();
#pragma unroll
      for (int index = 0; index < kTilesPerStage; ++index) {
        const u32 k_desc = stage_desc + descriptor_step(index * kTileBytes);
        const int tile = stage_in_block * kTilesPerStage + index;
        const u32 q_desc = query_desc + descriptor_step(tile * kQueryTileBytes);
#pragma unroll
        for (int k = 0; k < kTileElements / 16; ++k) {
          wgmma_mma(Element{}, scores, smem_desc_sw128(k_desc + k * 2),
                    smem_desc_sw128(q_desc + k * 2), tile + k > 0);
        }
      }
      wgmma_commit_group();
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(scores);
  }

  // Scales to the log2 domain and masks. A select, not an addition: a masked score may be NaN.
  __device__ void mask_scores(int first_token) {
    const int token = first_token + reload_warp() * 16 + reload_lane() / 4;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const int kv_limit = work.row_kv_end[row_of(r)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[r / 2 * 4 + half * 2 + r % 2];
        score = token + half * 8 < kv_limit ? __fmul_rn(score, scale) : -kInfinity;
      }
    }
  }

  // The same for the tokens whose bit is set.
  __device__ void mask_invalid(u64 invalid) {
    const u64 bits = invalid >> (reload_warp() * 16 + reload_lane() / 4);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      const bool is_masked = (bits >> i / 2 % 2 * 8 & 1) != 0;
      scores[i] = is_masked ? -kInfinity : __fmul_rn(scores[i], scale);
    }
  }

  // Writes P relative to the stale row max and sums it per row. Returns whether any probability
  // exceeds the rescale threshold, in which case P must be recomputed with the new row max.
  __device__ bool store_p(float factor, float (&partial_sum)[kRowsPerThread]) const {
    float max_p = 0.0f;
    float p[kBlockM / 2];
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      // Rounded, never fused into an FMA: equal scores must have equal differences to the row max.
      p[i] = ex2_approx(__fmul_rn(scores[i], factor) - row_max[i / 4 * 2 + i % 2]);
      max_p = fmaxf(max_p, p[i]);
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      partial_sum[r] = p[r / 2 * 4 + r % 2] + p[r / 2 * 4 + 2 + r % 2];
    }
    // The four 8x8 matrices: tokens 0-7 and 8-15 of the warp, for 8 rows and for the next 8.
    const int lane = reload_lane();
    const u32 address =
        shared_address(smem.probabilities[p_buffer]) +
        swizzled_offset<kTileRowBytes>(lane / 16 * 8 + lane % 8, reload_warp() * 2 + lane / 8 % 2);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      const float* acc = p + group * 4;
      stmatrix_x4_trans(
          address + group * 8 * kTileRowBytes, cvt_rn_x2_f32(Element{}, acc[1], acc[0]),
          cvt_rn_x2_f32(Element{}, acc[3], acc[2]), cvt_rn_x2_f32(Element{}, acc[5], acc[4]),
          cvt_rn_x2_f32(Element{}, acc[7], acc[6]));
    }
    fence_proxy_async();
    return max_p > kMaxUnnormalizedP;
  }

  // Raises the row max to the maximum of all warps' scores, and rescales l and O by alpha.
  __device__ void update_row_max(float factor) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float maximum = max_over_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], factor),
                                                 __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], factor)));
      if (reload_lane() < 4) smem.warp_rows[reload_warp()][row_of(r)] = maximum;
    }
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
    float alpha[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      float maximum = -kInfinity;
#pragma unroll
      for (int warp = 0; warp < kPvWarps; ++warp) {
        maximum = fmaxf(maximum, smem.warp_rows[warp][row_of(r)]);
      }
      alpha[r] = raise_row_max(row_max[r], row_sum[r], maximum);
    }
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      set_accumulator(accumulators, i, weighted(accumulator(accumulators, i), alpha, i));
    }
  }

  __device__ void clear_nonfinite_v(int first_token) const {
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
    clear_nonfinite(smem, max(work.unmasked_kv_end - first_token, 0), work.kv_end - first_token,
                    [&](int index) { return tile(index); });
    fence_proxy_async();
  }

  __device__ void process_block(int kv_block) {
    qk_gemm();
    float factor = scale;
    const int first_token = kv_block * kBlockN;
    if constexpr (kIsSparse) {
      const u64 invalid = smem.invalid_mask[pipe_stage(0)].all();
      if (invalid != 0) {
        mask_invalid(invalid);
        factor = 1.0f;
      }
    } else if (first_token + kBlockN > work.unmasked_kv_end) {
      mask_scores(first_token);
      factor = 1.0f;
      clear_nonfinite_v(first_token);
    }
    float partial_sum[kRowsPerThread];
    const bool needs_rescale = store_p(factor, partial_sum);
    if (named_barrier_sync_or(NamedBarrier::P0Ready, kPvThreads, needs_rescale)) {
      update_row_max(factor);
      store_p(factor, partial_sum);
      named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_sum[r] += partial_sum[r];
    pv_gemm();
    p_buffer ^= 1;
  }

  // Releases each stage of the KV block when the MMAs that read it are complete.
  template <int kStage = 0>
  __device__ void release_stages() const {
    wgmma_wait_group<kStagesPerBlock - 1 - kStage>();
    release(smem.kv_empty[pipe_stage(kStage)]);
    if constexpr (kStage + 1 < kStagesPerBlock) release_stages<kStage + 1>();
  }

  __device__ void pv_gemm() {
    const u32 p_desc = uniform_desc(smem.probabilities[p_buffer]);
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) wgmma_fence_operand(accumulators[index]);
    wgmma_fence();
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) {
      const u32 v_desc = uniform_desc(tile(index));
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {
        wgmma_mma_trans_a(Element{}, accumulators[index], smem_desc_sw128(v_desc + k * 128),
                          smem_desc_sw128(p_desc + k * 2), 1);
      }
      const bool ends_stage = index % kTilesPerStage == kTilesPerStage - 1;
      if (ends_stage || index == kLatentTiles - 1) wgmma_commit_group();
    }
    release_stages();
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) wgmma_fence_operand(accumulators[index]);
  }
};

// Sums over the eight lanes that hold the same rows.
__device__ inline float sum_over_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value += __shfl_xor_sync(~0u, value, lanes);
  }
  return value;
}

// Reduces the row sum l over the warps, each of which has other tokens.
__device__ inline void reduce_row_sum(SharedMemoryPlan& smem, const Consumer& consumer,
                                      ThreadRows& rows) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float row_sum = sum_over_lanes(consumer.row_sum[r]);
    if (reload_lane() < 4) smem.warp_rows[reload_warp()][row_of(r)] = row_sum;
  }
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float row_sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kPvWarps; ++warp) row_sum += smem.warp_rows[warp][row_of(r)];
    rows[r] = {consumer.row_max[r], row_sum};
  }
}

// State that persists across work items.
struct ConsumerState {
  float scale;
  PipelineState<kStages> pipe;
  u32 p_buffer = 0;

  __device__ ConsumerState(const Params& params, const SharedMemoryPlan&)
      : scale(score_scale(params) * kLog2E) {}
};

__device__ inline void process_work(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, ConsumerState& state) {
  Consumer consumer(params, smem, work, state.scale, state.pipe, state.p_buffer);
  const int end = work.first_kv_block + work.num_kv_blocks;
#pragma unroll 1
  for (int kv_block = work.first_kv_block; kv_block < end; ++kv_block)
    consumer.process_block(kv_block);
  // Without KV blocks no barrier of the mainloop orders the warps' waits for Q before its release.
  if (work.num_kv_blocks == 0) named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  if (reload_tid() == 0) arrive(smem.query_empty);
  ThreadRows rows;
  reduce_row_sum(smem, consumer, rows);
  epilogue(params, work, smem, consumer.accumulators, rows);
}
