// Consumer warps: QK GEMM, online softmax and PV GEMM. Each warp takes its own tokens of every KV
// block, and does not synchronize with the other consumers until the work item ends.

#pragma once

#include "common/barriers.cuh"
#include "common/output_gate.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "fragments.cuh"
#include "load_q.cuh"
#include "mask_v.cuh"
#include "mma.cuh"
#include "ptx/warp_matrix.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/gqa_score.cuh"
#include "softmax/value_scaling.cuh"
#include "sparse_tokens.cuh"
#include "token_scales.cuh"
#include "unaligned_rows.cuh"
#include "work_item.cuh"
#include "work_pipeline.cuh"

// Loads two chunks of the tokens of a step: of K, or transposed of V.
__device__ inline void load_k(u32 (&loaded)[4], const KeyRows& rows, const unsigned char* keys,
                              int step, int pair) {
  ldmatrix_x4(loaded, rows.at(keys, step, pair));
}
__device__ inline void load_k(u32 (&loaded)[4], const UnalignedKeyRows& rows,
                              const unsigned char* keys, int step, int pair) {
  rows.load(loaded, keys, step, pair);
}
__device__ inline void load_v(u32 (&loaded)[4], const ValueRows& rows, const unsigned char* values,
                              int step, int pair) {
  ldmatrix_x4_trans(loaded, rows.at(values, step, pair));
}
__device__ inline void load_v(u32 (&loaded)[4], const UnalignedValueRows& rows,
                              const unsigned char* values, int step, int pair) {
  rows.load(loaded, values, step, pair);
}

// QK GEMM of one step: S^T = K Q^T.
template <typename Rows>
__device__ inline void qk_gemm(const Rows& rows, const unsigned char* keys, int warp, int step,
                               const Query& query, float (&scores)[kRowGroups][4]) {
  const KeyScales scales(keys, warp, step);
  constexpr int kChains = kRowGroups == 1 ? 2 : 1;  // independent MMA chains
  float sums[kChains][kRowGroups][4] = {};
#pragma unroll
  for (int pair = 0; pair < KeyTile::kChunkPairs; ++pair) {
    u32 loaded[4];
    load_k(loaded, rows, keys, step, pair);
#pragma unroll
    for (int i = 0; i < kFragmentsPerLoad; ++i) {
      const int k = pair * kFragmentsPerLoad + i;
      u32 a[4];
      k_fragment(loaded, i, scales, pair, a);
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
        const uint2 q = query.at(n, k);
        mma_m16n8k16(Element{}, sums[k % kChains][n], a, q.x, q.y);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = kChains == 1 ? sums[0][n][e] : sums[0][n][e] + sums[kChains - 1][n][e];
    }
  }
}

// PV GEMM of one step: O^T += V^T P^T. Returns a word that depends on all V fragments, for
// arrive_after_reads.
template <typename Rows>
__device__ inline u32 pv_gemm(const Rows& rows, const unsigned char* values, int warp, int step,
                              const u32 (&probabilities)[kRowGroups][2], Output& output) {
  const ValueScales scales(values, warp, step);
  u32 read = 0;
#pragma unroll
  for (int pair = 0; pair < ValueTile::kChunkPairs / kDimParts; ++pair) {
    u32 loaded[4];
    load_v(loaded, rows, values, step, pair);
#pragma unroll
    for (int i = 0; i < kFragmentsPerLoad; ++i) {
      u32 a[4];
      v_fragment(loaded, i, scales, pair, a);
      // From converted fragments: that schedules conversions better than raw ones do.
      if (i == 1) read ^= a[0];
      // Block scales, or unaligned rows, of the other tokens: those of a[0] are in it.
      if ((kHasBlockScales || kHasUnalignedRows) && i == 1) read ^= a[2];
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
        mma_m16n8k16(Element{}, output[pair * kFragmentsPerLoad + i][n], a, probabilities[n][0],
                     probabilities[n][1]);
      }
    }
  }
  if constexpr (kFragmentsPerLoad > 1) return read;
  // From accumulators, because a word of every V fragment would take registers.
#pragma unroll
  for (int tile = 0; tile < kPartDimTiles; ++tile) read ^= __float_as_uint(output[tile][0][0]);
  return read;
}

// What rows of K and V of a warp are made of, and the rows: unaligned ones are made anew in every
// KV block.
template <typename Rows, typename AnyParams>
__device__ inline auto row_source(const AnyParams& params, int kv_head, Rows aligned) {
  if constexpr (kHasUnalignedRows) {
    return RowShifts(params, kv_head);
  } else {
    return aligned;
  }
}
__device__ inline const KeyRows& key_rows(const KeyRows& rows, int) { return rows; }
__device__ inline UnalignedKeyRows key_rows(const RowShifts& shifts, int warp) {
  return UnalignedKeyRows(warp, shifts);
}
__device__ inline const ValueRows& value_rows(const ValueRows& rows, int) { return rows; }
__device__ inline UnalignedValueRows value_rows(const RowShifts& shifts, int warp) {
  return UnalignedValueRows(warp, shifts);
}

// A word that depends on all K fragments, for arrive_after_reads.
__device__ inline u32 dependency_on(const Scores& scores) {
  u32 word = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    word ^= __float_as_uint(scores[step][0][0]);
    if (kHasTokenScales) word ^= __float_as_uint(scores[step][0][2]);  // the other scales
  }
  return word;
}

// Releases a stage; `read` depends on all that the lane has loaded from it.
__device__ inline void release(const Barrier& empty, u32 read) {
  __syncwarp();  // all lanes have read
  if (lane_index() == 0) arrive_after_reads(empty, read);
}

// Skips a stage whose tokens this warp masks. It still waits for the stage to fill: a warp that
// releases early could arrive twice before the producer observes the phase.
__device__ inline void skip_stage(SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  wait(smem.kv_full[kv_pipe.index], kv_pipe.phase);
  release(smem.kv_empty[kv_pipe.index], 0);
  kv_pipe.advance();
}

// Processes work item `work_idx`, whose Q load is in flight, and issues the Q load of the next one.
// Returns whether there is a next one.
__device__ inline bool process_work(const Params& params, int warp, const GqaScore& score,
                                    u32 work_idx, Query& query, bool& is_epilogue_busy,
                                    SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  const int head = head_of_warp(warp);
  const WorkItem& work = work_pipeline.at(work_idx, head);
  const auto k_source = row_source(params, work.kv_head, k_ldmatrix_rows(warp));
  const auto v_source = row_source(params, work.kv_head, v_ldmatrix_rows(warp));
  query.load(params, work, warp, smem);
  if constexpr (kHasOutputGate) {
    prefetch_gates(params, work.global_row(params, 0) * kHeadDimVo, work.rows * kHeadDimVo,
                   thread_in_head(warp));
  }
  const RowScales row_scales(query, score.scale);
  Softmax softmax;
  ValueScaling value_scaling;
  Output output = {};
  const int unmasked_kv_begin = work.unmasked_kv_begin;
  const int unmasked_kv_end = work.unmasked_kv_end;
  int first_token = work.first_kv_block * kBlockN + first_token_of_warp(warp);
#pragma unroll 1
  for (int kv_block = max(work.num_kv_blocks, 1); kv_block > 0;
       --kv_block, first_token += kBlockN) {
    if (kv_block == 1) {
      if constexpr (Query::kPrefetchesQ) {
        work_pipeline.wait_full(work_idx + 1);
        if (work_pipeline.has(work_idx + 1))
          query.prefetch(params, work_pipeline.at(work_idx + 1, head), warp);
      }
      if (work.num_kv_blocks == 0) break;
    }
    const int end_token = first_token + kWarpTokens;
    SparseTokens::Type sparse_tokens = 0;  // of this warp
    if constexpr (kIsSparse) {
      wait(smem.kv_full[kv_pipe.index], kv_pipe.phase);
      sparse_tokens = SparseTokens::of_warp(smem.sparse_tokens[kv_pipe.index], warp);
    }
    const bool has_boundary = kIsSparse
                                  ? sparse_tokens < SparseTokens::kAll
                                  : first_token < unmasked_kv_begin || end_token > unmasked_kv_end;
    if (has_boundary && (kIsSparse ? sparse_tokens <= 0
                                   : end_token <= work.kv_begin || first_token >= work.kv_end)) {
      skip_stage(smem, kv_pipe);
      skip_stage(smem, kv_pipe);
      continue;
    }
    Scores scores;
    wait(smem.kv_full[kv_pipe.index], kv_pipe.phase);
    const auto& k_rows = key_rows(k_source, warp);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      qk_gemm(k_rows, smem.kv[kv_pipe.index], warp, step, query, scores[step]);
    }
    if constexpr (kHasTokenScales) {
      TokenScales(k_rows, smem.kv[kv_pipe.index], warp).multiply(scores);
    }
    release(smem.kv_empty[kv_pipe.index], dependency_on(scores));
    kv_pipe.advance();

    scale_scores(score, row_scales, scores);
    if (has_boundary) {
      if constexpr (kIsSparse) {
        mask_sparse_scores(sparse_tokens, scores);
      } else {
        mask_scores(params, work, first_token, scores);
      }
    }
    softmax.update(scores, output);
    Probabilities probabilities;
    if constexpr (!kHasTokenScales) transpose_probabilities(scores, probabilities);

    unsigned char* values = smem.kv[kv_pipe.index];
    wait(smem.kv_full[kv_pipe.index], kv_pipe.phase);
    if constexpr (kIsSparse) {
      if constexpr (kUsesTma) {
        if (has_boundary) clear_sparse(sparse_tokens, warp, values);
      }
    } else if (has_boundary && clear_masked(params, work, first_token, warp, values)) {
      smem.nonfinite_work[work_idx % 2] = work_idx;
    }
    u32 read = 0;
    const auto& v_rows = value_rows(v_source, warp);
    if constexpr (kHasTokenScales) {
      TokenScales scales(v_rows, values, warp);
      if (has_boundary && scales.clear_masked(work, first_token)) {
        smem.nonfinite_work[work_idx % 2] = work_idx;
      }
      scales.scale_values(value_scaling, output);
      scales.multiply(scores);
      transpose_probabilities(scores, probabilities);
      read = scales.word();
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      read ^= pv_gemm(v_rows, values, warp, step, probabilities[step], output);
    }
    release(smem.kv_empty[kv_pipe.index], read);
    kv_pipe.advance();
  }
  if constexpr (kHasTokenScales) multiply_output(output, value_scaling.inverse());
  if constexpr (!Query::kPrefetchesQ) work_pipeline.wait_full(work_idx + 1);
  const bool has_next = work_pipeline.has(work_idx + 1);
  wait_for_epilogue(is_epilogue_busy);
  if (uses_epilogue_warps(work, smem.range, has_next)) {
    publish_partials(warp, softmax, output, smem);
    is_epilogue_busy = true;
  } else {
    if (kCombinesLastAtOnce && !has_next) {
      combine_warps<LastCombineSmem>(params, work, warp, work_idx, softmax, output, smem);
    } else {
      combine_warps<CombineSmem>(params, work, warp, work_idx, softmax, output, smem);
    }
    if (needs_combine(work, smem.range)) combine_splits(params, work, thread_in_head(warp), smem);
  }
  work_pipeline.release(work_idx);
  return has_next;
}

// All work items of the CTA. Starts over if the first one turns out stale, see scheduler_warp.cuh.
__device__ inline void consumer_loop(const Params& params, int warp, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  Query query(smem);
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    pdl_wait();
    if (work_pipeline.has(0)) query.prefetch(params, work_pipeline.at(0, head_of_warp(warp)), warp);
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  if (!work_pipeline.has(0)) return;
  const GqaScore score(params);
  PipelineState<kStages> kv_pipe;
  bool is_epilogue_busy = false;
  u32 work_idx = 0;
  while (process_work(params, warp, score, work_idx, query, is_epilogue_busy, smem, kv_pipe))
    ++work_idx;
}
