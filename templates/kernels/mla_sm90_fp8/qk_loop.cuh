// QK loop of the QK warpgroup: S = Q K^T and online softmax for every KV block of every work item.

#pragma once

#include "combine/row_scale.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/mov.cuh"
#include "ptx/sync.cuh"
#include "ptx/warp_matrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/row_state.cuh"
#include "softmax/scores.cuh"

constexpr int kTileSteps = kTileRowBytes / kStepElements;
constexpr int kQkSteps = kHeadDimQk / kStepElements;

// The MMAs of S = Q K^T for the KV block in a stage.
struct QkMma {
  u32 q_desc;
  u32 k_desc;

  __device__ QkMma(const SharedMemoryPlan& smem, int stage)
      : q_desc(descriptor_low(shared_address(&smem))) {
    // Opaque: compilers would hoist all descriptors out of the loop, and spill.
    mov_b32(q_desc);
    k_desc = q_desc + descriptor_step(kQueryBytes) + stage * descriptor_step(kKvStageBytes);
  }

  __device__ void issue(Scores& scores, int step) const {
    const int tile = step / kTileSteps;
    const u32 k_offset = step % kTileSteps * kStepElements;
    const u32 q = q_desc + descriptor_step(tile * kQueryTileBytes + k_offset);
    const u32 k = k_desc + descriptor_step(tile * kTileBytes + k_offset);
    if (tile < kLatentTiles) {
      wgmma_mma(E4m3{}, scores, smem_desc_sw128(q), smem_desc_sw128(k), step > 0);
    } else {
      wgmma_mma(E4m3{}, scores, smem_desc_sw64(q), smem_desc_sw64(k), 1);
    }
  }
};

// The KV block whose scores become probabilities.
struct SoftmaxBlock {
  int kv_block;  // in the sequence
  int stage;
  u32 p_addr;  // this lane's stmatrix address of P
  bool needs_mask;  // whether any row does not attend to the whole KV block
};

struct QkWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  PipelineState<kStages>& pipe;  // at the next KV block
  Softmax softmax;

  __device__ QkWarpgroup(SharedMemoryPlan& smem, const WorkItem& work, PipelineState<kStages>& pipe)
      : smem(smem), work(work), pipe(pipe) {}

  // Waits for the next KV block and returns its stage.
  __device__ int next_stage() {
    const int stage = pipe.index;
    wait(smem.kv_full[stage], pipe.phase);
    pipe.advance();
    return stage;
  }

  // Issues the QK GEMM of a KV block, interleaved with the row sums of the preceding one: a word of
  // P after each of the first `kPWords` MMAs. The tensor cores accept an MMA only when they have
  // done most of the previous one, and a warp that waits for that issues nothing else.
  __device__ void qk_gemm(Scores& scores, const Probabilities& previous, int stage) {
    const QkMma qk_mma(smem, stage);
    ProbabilitySums sums;
    wgmma_fence_operand(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      qk_mma.issue(scores, step);
      if (step < kPWords) sums.add_word(previous, step);
    }
    wgmma_commit_group();
    softmax.add(sums);
  }

  // This lane's stmatrix address of P of the KV block in `stage`.
  __device__ u32 p_address(int stage) const {
    const int lane = reload_lane();
    const int row = reload_warp() % 4 * kRowsPerWarp + lane % 16;
    return shared_address(smem.kv[stage]) + kProbabilitiesOffset +
           swizzled_offset<kRopeRowBytes>(row, lane / 16);
  }

  // One loop body for all KV blocks, not unrolled: I-cache misses at kernel start cost more than
  // the instructions themselves. The operands of the softmax are ready before the scores are: the
  // step from S to P is the critical path of the CTA.
  __device__ void process_blocks() {
    Scores scores;
    Probabilities probabilities = {};
    const int end = work.first_kv_block + work.num_kv_blocks;
    const int first_masked = work.unmasked_kv_end / kBlockN;
#pragma unroll 1
    for (int kv_block = work.first_kv_block; kv_block < end; ++kv_block) {
      const int stage = next_stage();
      qk_gemm(scores, probabilities, stage);
      const float scale = smem.score_scale;
      const SoftmaxBlock softmax_block = {kv_block, stage, p_address(stage),
                                          kv_block >= first_masked};
      wgmma_wait_group<0>();
      wgmma_fence_operand(scores);
      const bool needs_rescale = softmax_step(scores, scale, probabilities, softmax_block);
      publish_p(stage, needs_rescale);
    }
    ProbabilitySums sums;
#pragma unroll
    for (int word = 0; word < kPWords; ++word) sums.add_word(probabilities, word);
    softmax.add(sums);
  }

  // With a small `kBlockM` the last warps have no rows. An any-sync makes the result warp-uniform.
  __device__ static bool has_rows() {
    return kWarpsWithRows == kQkWarps || __any_sync(~0u, reload_warp() % 4 < kWarpsWithRows);
  }

  // Softmax of a KV block. The fast path computes and stores P with the stale row max and no mask.
  // If the result does not hold, the slow path masks, updates the row max and stores P again.
  // Returns whether O needs a rescale.
  __device__ bool softmax_step(Scores& scores, float scale, Probabilities& probabilities,
                               const SoftmaxBlock& softmax_block) {
#pragma unroll
    for (int word = 0; word < kPWords; ++word) {
      softmax.exp_word(scores, scale, probabilities, word);
    }
    if (!has_rows()) return false;
    store(probabilities, softmax_block.p_addr);
    if (softmax.fast_path_holds(probabilities, softmax_block.needs_mask)) return false;
    scale_scores(scores, scale);
    if (softmax_block.needs_mask) {
      mask_scores(scores, work, softmax_block.kv_block * kBlockN,
                  [](int r) { return score_row(r); });
    }
    float alpha[kScoreRows];
    softmax.update_row_max(scores, probabilities, alpha);
    store(probabilities, softmax_block.p_addr);
    return publish_alpha(alpha, softmax_block);
  }

  __device__ static void store(const Probabilities& probabilities, u32 p_addr) {
    stmatrix_x4(p_addr, probabilities[0], probabilities[1], probabilities[2], probabilities[3]);
    stmatrix_x4(p_addr ^ 32, probabilities[4], probabilities[5], probabilities[6],
                probabilities[7]);
  }

  // Arrives at `probabilities_full` for the PV warpgroups.
  __device__ void publish_p(int stage, bool needs_rescale) const {
    if (!has_rows()) return;
    if (reload_lane() == 0) {
      reinterpret_cast<unsigned char*>(&smem.rescale_flags[stage])[reload_warp() % 4] =
          static_cast<unsigned char>(needs_rescale);
    }
    fence_proxy_async();
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.probabilities_full[stage]);
  }

  // Stores alpha of the rows unless it is 1 for the whole warp. The first KV block of a work item
  // has no O to rescale. Returns whether alpha was stored.
  __device__ bool publish_alpha(const float (&alpha)[kScoreRows],
                                const SoftmaxBlock& softmax_block) const {
    const bool needs_rescale = alpha[0] != 1.0f || alpha[1] != 1.0f;
    if (!__any_sync(~0u, needs_rescale) || softmax_block.kv_block == work.first_kv_block)
      return false;
    if (reload_lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r) smem.alpha[softmax_block.stage][score_row(r)] = alpha[r];
    }
    return true;
  }

  __device__ void process_work() {
    if (work.num_kv_blocks == 0) {
      // All warps must have observed the phase of Q before it is released. With KV blocks the MMAs
      // ensure that: they complete after all four warps have issued them.
      named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
      release_query();
      return;
    }
    process_blocks();
    release_query();
  }

  __device__ void release_query() const {
    if (reload_tid() % 128 == 0) arrive(smem.query_empty);
  }

  // Publishes row max, row sum and scale of the rows of the work item to the PV warpgroups. Of the
  // four lanes that share two rows, each of the first two stores one.
  __device__ void publish_row_state(const Params& params) const {
    if (!has_rows()) return;
    const int stage = work_slot(work.work_idx);
    const float row_sums[kScoreRows] = {quad_reduce_sum(softmax.row_sum[0]),
                                        quad_reduce_sum(softmax.row_sum[1])};
    const int r = reload_lane() % 4;
    if (r < kScoreRows) {
      const RowState state = {r == 0 ? softmax.row_max[0] : softmax.row_max[1],
                              r == 0 ? row_sums[0] : row_sums[1]};
      const int row = score_row(r);
      smem.row_max[stage][row] = state.row_max;
      smem.row_sum[stage][row] = state.row_sum;
      // |O| <= l * max |V|.
      smem.row_scale[stage][row] = row_scale_of(params, work, row, state, state.row_sum * kMaxE4m3);
    }
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.row_state_full[stage]);
  }
};

__device__ inline void qk_loop(const Params& params, SharedMemoryPlan& smem) {
  if (reload_tid() % 128 == 0) smem.score_scale = score_scale(params) * kLog2E;
  named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
  PipelineState<kStages> pipe;
  work_loop(smem, [&](const WorkItem& work, u32 work_idx) {
    wait_query(smem, work_idx);
    QkWarpgroup qk_warpgroup(smem, work, pipe);
    qk_warpgroup.process_work();
    qk_warpgroup.publish_row_state(params);
  });
}
