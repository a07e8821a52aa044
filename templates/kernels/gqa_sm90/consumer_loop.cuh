// The consumers: each warp attends to tokens of its own in every tile, with no word to the other
// consumers until an item ends.

#pragma once

#include "combine_splits.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "fragments.cuh"
#include "load_q.cuh"
#include "mask_v.cuh"
#include "mma.cuh"
#include "ptx/barrier.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/softmax_scale.cuh"
#include "tile_scheduler.cuh"
#include "work_pipeline.cuh"

// A word made of all keys that have been multiplied.
__device__ inline u32 word_of(const Scores& scores) {
  u32 word = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) word ^= __float_as_uint(scores[step][0][0]);
  return word;
}

// `read` is made of all that the lane has read.
__device__ inline void release(const Barrier& empty, u32 read) {
  __syncwarp();  // all lanes have read
  if (lane_index() == 0) arrive_after_reads(empty, read);
}

// Goes by a stage of which this warp needs nothing. It waits all the same: who releases what has
// not come yet could do so twice before the loader looks.
__device__ inline void skip_stage(SharedMemoryPlan& smem, PipelineState<kStages>& pipe) {
  wait(smem.kv_full[pipe.index], pipe.phase);
  release(smem.kv_empty[pipe.index], 0);
  pipe.advance();
}

// Item `work_idx` of the block, whose query has been asked for; asks for the next one's. Says
// whether there is one.
__device__ inline bool process_work(const Params& params, int warp, float factor, u32 work_idx,
                                    Query& query, bool& is_epilogue_busy, SharedMemoryPlan& smem,
                                    PipelineState<kStages>& pipe) {
  const WorkPipeline& pipeline = smem.work_pipeline;
  const int head = head_of_warp(warp);
  const WorkItem& work = pipeline.at(work_idx, head);
  const MatrixRows key_matrices = key_rows(warp);
  const MatrixRows value_matrices = value_rows(warp);
  query.finish(params, work, warp, smem);
  const ScoreFactors factors(query, factor);
  Softmax softmax;
  Output output = {};
  const int unmasked_kv_begin = work.unmasked_kv_begin;
  const int unmasked_kv_end = work.unmasked_kv_end;
  int first_token = work.first_kv_block * kBlockN + first_of_warp(warp);
#pragma unroll 1
  for (int kv_block = max(work.num_kv_blocks, 1); kv_block > 0;
       --kv_block, first_token += kBlockN) {
    if (kv_block == 1) {
      if constexpr (Query::kPrefetchesQ) {
        pipeline.wait_full(work_idx + 1);
        if (pipeline.has(work_idx + 1)) query.begin(params, pipeline.at(work_idx + 1, head), warp);
      }
      if (work.num_kv_blocks == 0) break;
    }
    const int end_token = first_token + kWarpTokens;
    const bool has_boundary = first_token < unmasked_kv_begin || end_token > unmasked_kv_end;
    if (has_boundary && (end_token <= work.kv_begin || first_token >= work.kv_end)) {
      skip_stage(smem, pipe);
      skip_stage(smem, pipe);
      continue;
    }
    Scores scores;
    wait(smem.kv_full[pipe.index], pipe.phase);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      qk_gemm(key_matrices, smem.kv[pipe.index], step, query, scores[step]);
    }
    release(smem.kv_empty[pipe.index], word_of(scores));
    pipe.advance();

    scale_scores(factors, scores);
    if (has_boundary) mask_scores(params, work, first_token, scores);
    softmax.update(scores, output);
    Probabilities probabilities;
    transpose_probabilities(scores, probabilities);

    unsigned char* values = smem.kv[pipe.index];
    wait(smem.kv_full[pipe.index], pipe.phase);
    if (has_boundary && clear_masked(work, first_token, warp, values)) {
      smem.nonfinite_work[work_idx % 2] = work_idx;
    }
    u32 read = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      read ^= pv_gemm(value_matrices, values, step, probabilities[step], output);
    }
    release(smem.kv_empty[pipe.index], read);
    pipe.advance();
  }
  if constexpr (!Query::kPrefetchesQ) pipeline.wait_full(work_idx + 1);
  const bool has_next = pipeline.has(work_idx + 1);
  wait_for_epilogue(is_epilogue_busy);
  if (uses_epilogue_warps(work, has_next)) {
    publish_partials(warp, softmax, output, smem);
    is_epilogue_busy = true;
  } else {
    combine_warps(params, work, warp, work_idx, softmax, output, smem);
    if (work.num_splits > 1) combine_splits(params, work, head_thread(warp), smem);
  }
  pipeline.release(work_idx);
  return has_next;
}

// All items of the block.
__device__ inline void consumer_loop(const Params& params, int warp, SharedMemoryPlan& smem) {
  const WorkPipeline& pipeline = smem.work_pipeline;
  Query query(smem);
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    pdl_wait();
    if (pipeline.has(0)) query.begin(params, pipeline.at(0, head_of_warp(warp)), warp);
    __syncwarp();
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!smem.is_first_work_valid);
  if (!pipeline.has(0)) return;
  const float factor = score_scale(params) * params.score_factor * kLog2E;
  PipelineState<kStages> pipe;
  bool is_epilogue_busy = false;
  u32 work_idx = 0;
  while (process_work(params, warp, factor, work_idx, query, is_epilogue_busy, smem, pipe))
    ++work_idx;
}
