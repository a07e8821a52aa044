// Epilogue of a work item: stores final rows, or publishes a partial and combines splits, and
// restores NaN/Inf of V.

#pragma once

#include "accumulators.cuh"
#include "combine/fixed_splits.cuh"
#include "combine/pairwise.cuh"
#include "combine/partial.cuh"
#include "combine/subtiles.cuh"
#include "common/barriers.cuh"
#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_token.cuh"
#include "ptx/cvt.cuh"
#include "ptx/exit.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/work_rows.cuh"
#include "store_rows.cuh"
#include "thread_rows.cuh"

// The main loop zeroes non-finite V elements so that masked tokens cannot poison a row (0 x NaN).
// Rows that do attend to one are patched after the store, off the fast path.

// Visits the tokens that may hold cleared elements; `add` takes the stored token and its position.
// A probability of 0 counts like any other: a non-finite V makes the row non-finite.
template <typename Add>
__device__ inline void add_nonfinite(const Params& params, const WorkItem& work, Add add) {
  const int end = min((work.first_kv_block + work.num_kv_blocks) * kBlockN, work.kv_end);
  const int* page_ids = params.block_tables + block_table_row(params, work.seq_idx).start;
  for (int token = max(work.unmasked_kv_end, work.first_kv_block * kBlockN); token < end; ++token) {
    const int page = page_ids[token / kPageSize];
    if (!is_valid_page(page, params.num_pages)) continue;
    add(stored_token(params, page, token % kPageSize), token);
  }
}

// `ptr_of` returns the address of component `c` of float4 `i` of this thread: a `Stored`, already
// multiplied by `scale`.
template <typename Stored, typename PtrOf>
__device__ inline void restore_nonfinite(const Params& params, const WorkItem& work, float scale,
                                         PtrOf ptr_of) {
  if constexpr (kIsSparse) return;  // every row attends to all top-k tokens, nothing is cleared
  add_nonfinite(params, work, [&](const StoredToken& cached, int token) {
    const int warp = reload_warp();
#pragma unroll 1
    for (int element_idx = 0; element_idx < kAccumulators * 4; ++element_idx) {
      const int i = element_idx / 4;
      const int c = element_idx % 4;
      if (token >= work.row_kv_end[element_row(warp, i, c)]) continue;
      const float value = cached.value(element_dim(warp, i, c));
      if (fabsf(value) <= kFloatMax) continue;
      u16* stored = ptr_of(i, c);
      const float sum = cvt_f32(Stored{}, *stored) + value * scale;
      *stored = static_cast<u16>(cvt_rn_x2_f32(Stored{}, 0.0f, sum));
    }
  });
}

__device__ inline void write_partial(const Params& params, const WorkItem& work,
                                     SharedMemoryPlan& smem, const PartialOut& target,
                                     const Accumulators& accumulators, const ThreadRows& rows) {
  float scales[kRowsPerThread];
  compute_fp16_scales(smem, accumulators, rows, scales);
#pragma unroll
  for (int frag = 0; frag < kAccumulators; ++frag) {
    const int i = accumulator_in_frag_order(frag);
    *target.slot(i) = pack_half4(weighted(accumulator(accumulators, i), scales, i));
  }
  store_partial_states(partial_states(params, own_slot(params, work)), rows, scales);
}

__device__ inline void store_partial(const Params& params, const WorkItem& work,
                                     SharedMemoryPlan& smem, const CombineSmem& combine_smem,
                                     const Accumulators& accumulators, const ThreadRows& rows) {
  const PartialOut target(params, work, combine_smem);
  write_partial(params, work, smem, target, accumulators, rows);
  if (!nonfinite_flag(smem, work)) return;
  restore_nonfinite<Fp16>(params, work, 1.0f,
                          [&](int i, int c) { return reinterpret_cast<u16*>(target.slot(i)) + c; });
}

__device__ inline void store_final(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem, const Accumulators& accumulators,
                                   const ThreadRows& rows) {
  store_rows(params, work, smem, accumulators, rows);
  if (!nonfinite_flag(smem, work)) return;
  restore_nonfinite<Element>(params, work, output_scale(params), [&](int i, int c) {
    const int warp = reload_warp();
    return params.out + global_row(params, work, element_row(warp, i, c)) * kHeadDimVo +
           element_dim(warp, i, c);
  });
}

// Stores one of several splits. If nothing follows in this CTA, the sub-tile that it reduces stays
// in shared memory, and it waits for the other splits.
__device__ inline void publish_and_combine(const Params& params, const WorkItem& work,
                                           SharedMemoryPlan& smem, const Accumulators& accumulators,
                                           const ThreadRows& rows) {
  const CombineSmem combine_smem = combine_smem_of_subtile(smem, work);
  store_partial(params, work, smem, combine_smem, accumulators, rows);
  semaphore_arrive(params, work);
  if (work.split_idx >= work.num_reducers) return;
  semaphore_wait(params, work);
  if (combine_smem.num_frags > 0) reduce_subtile(params, work, smem, combine_smem);
  exit_if(work.num_splits);
}

// Final rows of a sequence with one split. Splits of others are combined after the last work item
// of the CTA, or of the phase.
__device__ inline void store_fixed_split(const Params& params, const WorkItem& work,
                                         SharedMemoryPlan& smem, const Accumulators& accumulators,
                                         const ThreadRows& rows) {
  if (work.num_splits == 1) {
    store_final(params, work, smem, accumulators, rows);
  } else if (ends_phase(work)) {
    if constexpr (kCallsCombine) call_combine_fixed_splits(params);
  } else {
    const CombineSmem nothing = {smem.query, 1, 0, 0, 0, 0};
    store_partial(params, work, smem, nothing, accumulators, rows);
  }
}

__device__ inline void epilogue(const Params& params, const WorkItem& work, SharedMemoryPlan& smem,
                                Accumulators& accumulators, ThreadRows& rows) {
  if constexpr (kBatchInvariant) {
    store_fixed_split(params, work, smem, accumulators, rows);
  } else if (kHasTwoPools && !__any_sync(~0u, work.num_splits != 1)) {
    // Lists are short, so a CTA may store once, unsplit: the compiler places this path near the
    // main loop, where the I-cache has it. Otherwise it places the code of splits there: short
    // calls of other kernels are split.
    store_final(params, work, smem, accumulators, rows);
  } else if (work.num_splits == 1 || is_only_reducer(work)) {
    if (work.num_splits > 1) combine_pair(params, work, smem, accumulators, rows);
    store_final(params, work, smem, accumulators, rows);
  } else {
    publish_and_combine(params, work, smem, accumulators, rows);
  }
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  if (reload_tid() == 0) nonfinite_flag(smem, work) = 0;
}
