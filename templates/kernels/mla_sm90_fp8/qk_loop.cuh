// The scorer, four warps: scores and probabilities of all blocks of all items.

#pragma once

#include "combine/fp16_scale.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma_operands.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/row_reduce.cuh"
#include "softmax/softmax_scale.cuh"

// A block whose scores are computed.
struct SoftmaxBlock {
  int kv_block_idx;  // of the request's
  int stage;
  u32 p_addr;  // where this lane stores its part of the probabilities
  bool needs_mask;  // whether some row does not see all of it
};

struct QkWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  PipelineState<kStages>& pipe;  // of the block whose scores are next
  Softmax softmax;

  __device__ QkWarpgroup(SharedMemoryPlan& smem, const WorkItem& work, PipelineState<kStages>& pipe)
      : smem(smem), work(work), pipe(pipe) {}

  // When the tokens of the next block have come; its stage.
  __device__ int next_stage() {
    const int stage = pipe.index;
    wait(smem.kv_full[stage], pipe.phase);
    pipe.advance();
    return stage;
  }

  // Begins the scores of a block, and adds up the probabilities of the one before, of which a word
  // follows each step: tensor cores take a step only when they have done most of the one before,
  // and a warp that waits for that does nothing else.
  __device__ void qk_gemm(Scores& scores, const Probabilities& previous, int stage) {
    const ScoreSteps steps(smem, stage);
    ProbabilitySums sums;
    wgmma_fence_operand(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step) {
      steps.begin(scores, step);
      if (step < kWords) sums.add_word(previous, step);
    }
    wgmma_commit_group();
    softmax.add(sums);
  }

  // Where this lane stores its part of the probabilities of the block in `stage`.
  __device__ u32 p_address(int stage) const {
    const int lane = reload_lane();
    const int row = reload_warp() % 4 * kRowsPerWarp + lane % 16;
    return shared_address(smem.kv[stage]) + kProbabilitiesOffset +
           swizzled_offset<kRopeRowBytes>(row, lane / 16);
  }

  // All of it stands here once: until an SM has had instructions, fetching them takes it longer
  // than what they say. What probabilities take is at hand when the scores are: nobody waits as
  // long for anything as for what follows them.
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
      const bool rescales = softmax_step(scores, scale, probabilities, softmax_block);
      publish(stage, rescales);
    }
    ProbabilitySums sums;
#pragma unroll
    for (int word = 0; word < kWords; ++word) sums.add_word(probabilities, word);
    softmax.add(sums);
  }

  // Of a narrow tile, the last warps have none. A vote, so that compilers know all lanes agree.
  __device__ static bool has_rows() {
    return kWarpsWithRows == kQkWarps || __any_sync(~0u, reload_warp() % 4 < kWarpsWithRows);
  }

  // Turns scores into probabilities and stores them, and once more those that are not what they
  // should be. Says whether a reference has moved, so that what was before is multiplied by
  // factors.
  __device__ bool softmax_step(Scores& scores, float scale, Probabilities& probabilities,
                               const SoftmaxBlock& softmax_block) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      softmax.exp_word(scores, scale, probabilities, word);
    }
    if (!has_rows()) return false;
    store(probabilities, softmax_block.p_addr);
    if (softmax.fits(probabilities, softmax_block.needs_mask)) return false;
    scale_scores(scores, scale);
    if (softmax_block.needs_mask) mask_scores(scores, work, softmax_block.kv_block_idx * kBlockN);
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

  // Tells consumers that the probabilities are there.
  __device__ void publish(int stage, bool rescales) const {
    if (!has_rows()) return;
    if (reload_lane() == 0) {
      reinterpret_cast<unsigned char*>(&smem.rescales[stage])[reload_warp() % 4] =
          static_cast<unsigned char>(rescales);
    }
    fence_proxy_async();
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.probabilities_full[stage]);
  }

  // What the sums before a block are multiplied by: before a first block there are none. Says
  // whether it is other than 1.
  __device__ bool publish_alpha(const float (&alpha)[kScoreRows],
                                const SoftmaxBlock& softmax_block) const {
    const bool needs_rescale = alpha[0] != 1.0f || alpha[1] != 1.0f;
    if (!__any_sync(~0u, needs_rescale) || softmax_block.kv_block_idx == work.first_kv_block)
      return false;
    if (reload_lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r)
        smem.rescale[softmax_block.stage][score_row(r)] = alpha[r];
    }
    return true;
  }

  __device__ void process_work() {
    if (work.num_kv_blocks == 0) {
      // When all warps have seen the query come; products would see to that.
      barrier_sync(kQkBarrier, kQkThreads);
      release_query();
      return;
    }
    process_blocks();
    release_query();
  }

  __device__ void release_query() const {
    if (reload_tid() % 128 == 0) arrive(smem.query_empty);
  }

  // Leaves what the rows have come to, for the consumers.
  __device__ void publish_row_state(int stage) const {
    if (!has_rows()) return;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      const float row_sum = quad_reduce_sum(softmax.row_sum[r]);
      if (reload_lane() % 4 != 0) continue;
      smem.row_max[stage][score_row(r)] = softmax.row_max[r];
      smem.row_sum[stage][score_row(r)] = row_sum;
      // A row adds up values by its probabilities.
      smem.row_scale[stage][score_row(r)] = fp16_scale(row_sum * kMaxValue);
    }
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.row_state_full[stage]);
  }
};

__device__ inline void qk_loop(const Params& params, SharedMemoryPlan& smem) {
  if (reload_tid() % 128 == 0) smem.score_scale = score_scale(params) * kLog2E;
  barrier_sync(kQkBarrier, kQkThreads);
  PipelineState<kStages> pipe;
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    wait_query(smem, work_idx);
    QkWarpgroup qk_warpgroup(smem, work, pipe);
    qk_warpgroup.process_work();
    work_idx = work.work_idx;  // not kept in a register meanwhile
    qk_warpgroup.publish_row_state(work_slot(work_idx));
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx)]);
    ++work_idx;
  }
}
