// Epilogue of a work item: combines the partial O of the consumer warps, stores finished rows or a
// partial of a split, and combines the splits of a work tile.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fixed_splits.cuh"
#include "fragments.cuh"
#include "mask_v.cuh"
#include "mma.cuh"
#include "partials.cuh"
#include "ptx/atomic.cuh"
#include "ptx/load.cuh"
#include "scheduler/schedule_range.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/row_state.cuh"
#include "work_item.cuh"
#include "work_pipeline.cuh"

// Workspace slot of a split. Each CTA has two slots per kv head: for the split that its range
// begins with, and for the one that it ends with.
__device__ inline int partial_slot(const Params& params, const WorkItem& work, int split_idx) {
  const int slot =
      (work.first_split + split_idx * params.cta_group_size) * 2 + (split_idx == 0 ? 1 : 0);
  return slot * kKvHeadsPerCta + work.kv_head % kKvHeadsPerCta;
}

// Combine of the splits of a work tile: the last CTA to arrive at the semaphore reduces the
// partials of all splits, in split order. No CTA waits for another.
constexpr int kSplitsPerStep = 8 * kDimParts;  // loads in flight, more where a thread has more dims

__device__ inline void combine_row(const Params& params, const WorkItem& work, int row, int dim) {
  RowPart total;
#pragma unroll 1
  for (int first = 0; first < work.num_splits; first += kSplitsPerStep) {
    // The total takes part as one more split.
    RowState states[1 + kSplitsPerStep] = {total.state};
    float4 outs[1 + kSplitsPerStep] = {total.out};
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      // Behind the last split, loads repeat it.
      const int slot = partial_slot(params, work, min(first + i, work.num_splits - 1));
      const float2 state = ld_global_cg_v2_f32(partial_states(params, slot) + row);
      states[1 + i] = {state.x, state.y};
      outs[1 + i] = ld_global_cg_v4_f32(partial_out_ptr(params, slot, row, dim));
    }
    total = combine_parts(states, 1 + work.num_splits - first, [&](int i) { return outs[i]; });
  }
  store_finished(params, work, row, dim, total);
}

// The same of a whole work tile over lists, by thread `thread` of the kv head: its vectors
// together, and no load behind the last split, because what follows the last KV block is much of
// the time of a small call.
__device__ inline void combine_list(const Params& params, const WorkItem& work, int thread) {
  constexpr int kQuads = kHeadDimVo / 4;
  constexpr int kVecs = ceil_div(kBlockM * kQuads, kThreadsPerHead);
  constexpr int kSplits = kVecs < 8 ? 16 / kVecs : 2;  // loaded together
  const int num_splits = work.num_splits;
  const int first_slot = work.first_split * 2;
  const u32 slots = params.cta_group_size * 2;  // between two splits
  RowPart totals[kVecs];
  int rows[kVecs];
  u64 states[kVecs];
  u64 outs[kVecs];
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    const int vec_idx = thread + vec * kThreadsPerHead;
    rows[vec] = vec_idx / kQuads;
    states[vec] = reinterpret_cast<u64>(partial_states(params, first_slot) + rows[vec]);
    outs[vec] =
        reinterpret_cast<u64>(partial_out_ptr(params, first_slot, rows[vec], vec_idx % kQuads * 4));
  }
#pragma unroll 1
  for (int first = 0; first < num_splits; first += kSplits) {
    // The total takes part as one more split.
    RowState split_states[kVecs][1 + kSplits];
    float4 split_outs[kVecs][1 + kSplits];
#pragma unroll
    for (int i = 0; i < kSplits; ++i) {
      const u64 slot = first + i == 0 ? 1 : (first + i) * slots;
#pragma unroll
      for (int vec = 0; vec < kVecs; ++vec) {
        split_states[vec][1 + i] = kEmptyRow;
        split_outs[vec][1 + i] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + i >= num_splits || rows[vec] >= work.rows) continue;
        const float2 state = ld_global_cg_v2_f32(
            reinterpret_cast<const void*>(states[vec] + slot * (kBlockM * sizeof(RowState))));
        split_states[vec][1 + i] = {state.x, state.y};
        split_outs[vec][1 + i] = ld_global_cg_v4_f32(
            reinterpret_cast<const void*>(outs[vec] + slot * (kBlockM * kHeadDimVo * 4)));
      }
    }
#pragma unroll
    for (int vec = 0; vec < kVecs; ++vec) {
      split_states[vec][0] = totals[vec].state;
      split_outs[vec][0] = totals[vec].out;
      totals[vec] =
          combine_parts(split_states[vec], 1 + kSplits, [&](int i) { return split_outs[vec][i]; });
    }
  }
#pragma unroll
  for (int vec = 0; vec < kVecs; ++vec) {
    if (rows[vec] >= work.rows) break;
    const int dim = (thread + vec * kThreadsPerHead) % kQuads * 4;
    store_finished(params, work, rows[vec], dim, totals[vec]);
  }
}

// Whether splits of the work tile are left to combine across CTAs after this work item: every split
// of a range, or the last fixed split of a tile in the range of this CTA.
__device__ inline bool needs_combine(const WorkItem& work, const ScheduleRange& range) {
  return kBatchInvariant ? ends_part(work, range) : work.num_splits > 1;
}

// Called by all consumers, each for its kv head, after they have stored the partial of this split.
__device__ inline void combine_splits(const Params& params, const WorkItem& work,
                                      int thread_in_head, SharedMemoryPlan& smem) {
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (threadIdx.x == 0) {
    u32* semaphore = params.semaphores + work.first_split;
    u32 others = static_cast<u32>(work.num_splits - 1);
    if constexpr (kBatchInvariant) {
      const TileParts parts(params, work, smem.range);
      semaphore = params.semaphores + parts.first_cta;
      others = static_cast<u32>(parts.num_parts - 1);
    }
    const bool is_last = atom_add_acq_rel_gpu(semaphore, 1) == others;
    if (is_last) *semaphore = 0;  // for the next launch
    smem.is_last_split = is_last;
  }
  __syncwarp();
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (!smem.is_last_split) return;
  if constexpr (kIsSparse && !kBatchInvariant) return combine_list(params, work, thread_in_head);
  // The combine buffer is free until the next work item.
  NodeList& list = reinterpret_cast<NodeList&>(smem.combine_buffer);
  static_assert(sizeof list <= sizeof smem.combine_buffer, "the nodes fit in the combine buffer");
  int num_nodes = 0;
  if constexpr (kBatchInvariant) num_nodes = list.fill(params, work, smem.range);
  constexpr int kQuads = kHeadDimVo / 4;
#pragma unroll 1
  for (int vec_idx = thread_in_head; vec_idx < work.rows * kQuads; vec_idx += kThreadsPerHead) {
    const int row = vec_idx / kQuads;
    const int dim = vec_idx % kQuads * 4;
    if constexpr (kBatchInvariant) {
      combine_nodes(params, work, list, num_nodes, row, dim);
    } else {
      combine_row(params, work, row, dim);
    }
  }
  if constexpr (kBatchInvariant) {
    __syncwarp();
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);  // the nodes are read
  }
}

// Combine of the consumer warps through shared memory, in the sub-tiles of a combine buffer, by the
// consumers or by the dedicated epilogue warps: four adjacent dims of a row, over all warps of kv
// head `head` of the CTA.
template <typename Smem>
__device__ inline RowPart combined_row(SharedMemoryPlan& smem, int head, int row, int dim) {
  RowState states[kTokenWarps];
#pragma unroll
  for (int rank = 0; rank < kTokenWarps; ++rank) {
    states[rank] = Smem::states(smem)[rank * kKvHeadsPerCta + head][row / 8][row % 8];
  }
  return combine_parts(states, kTokenWarps, [&](int rank) {
    return *reinterpret_cast<const float4*>(
        &Smem::outs(smem)[rank * kKvHeadsPerCta + head][row / 8][row % 8][dim]);
  });
}

// Stores four adjacent dims of a row: final if the work tile is not split, else partial.
__device__ inline void store_combined(const Params& params, const WorkItem& work, int row, int dim,
                                      const RowPart& partial, const ScheduleRange& range) {
  if (work.num_splits == 1) return store_finished(params, work, row, dim, partial);
  if constexpr (kBatchInvariant) return store_fixed_split(params, work, range, row, dim, partial);
  const int slot = partial_slot(params, work, work.split_idx);
  *partial_out_ptr(params, slot, row, dim) = partial.out;
  if (dim == 0) partial_states(params, slot)[row] = partial.state;
}

// Stores a warp's share of a sub-tile to the combine buffer. All parts have the same row states.
template <typename Smem>
__device__ inline void store_warp_partial(int first_row, int first_dim, int warp,
                                          const Softmax& softmax, const Output& output,
                                          SharedMemoryPlan& smem) {
  const int slot = warp_in_part(warp);
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
    const int group = n % (Smem::kTileRows / 8);
    if ((n - group) * 8 != first_row) continue;
    if (part_of_warp(warp) == 0) softmax.publish(n, Smem::states(smem)[slot][group]);
#pragma unroll
    for (int dim = 0; dim < kPartDims; dim += Smem::kTileDims) {
      if (dim == first_dim)
        store_to_combine_buffer<Smem::kTileDims>(output, n, dim / 16,
                                                 part_of_warp(warp) * Smem::kTileDims,
                                                 Smem::outs(smem)[slot][group]);
    }
  }
}

// Combines the sub-tile of one kv head; thread `thread` of `threads` takes every `threads`-th
// vector, and over lists two of a row, whose warps have the same weights.
template <typename Smem>
__device__ inline void combine_partials(const Params& params, const WorkItem& work, u32 work_idx,
                                        int first_row, int first_dim, int thread, int threads,
                                        SharedMemoryPlan& smem) {
  constexpr int kTogether = kIsSparse ? 2 : 1;
  constexpr int kQuads = kDimParts * Smem::kTileDims / 4 / kTogether;
#pragma unroll 1
  for (int vec_idx = thread; vec_idx < Smem::kTileRows * kQuads; vec_idx += threads) {
    const int row_in_buffer = vec_idx / kQuads;
    const int row = first_row + row_in_buffer;
    if (row >= work.rows) break;
    const int first_in_buffer = vec_idx % kQuads * 4;
    RowPart partials[kTogether];
    int dims[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int dim_in_buffer = first_in_buffer + i * kQuads * 4;
      const int part = kDimParts == 1 ? 0 : dim_in_buffer / Smem::kTileDims;
      dims[i] = part * (kPartDims - Smem::kTileDims) + first_dim + dim_in_buffer;
      partials[i] =
          combined_row<Smem>(smem, work.kv_head % kKvHeadsPerCta, row_in_buffer, dim_in_buffer);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      // Over lists no V is masked.
      if (!kIsSparse && smem.nonfinite_work[work_idx % 2] == work_idx) {
        partials[i].out = restore_nonfinite(params, work, row, dims[i], partials[i].out);
      }
      store_combined(params, work, row, dims[i], partials[i], smem.range);
    }
  }
}

// Index of this thread among the consumer threads of its kv head.
__device__ inline int thread_in_head(int warp) {
  if constexpr (kIsSparse) return static_cast<int>(threadIdx.x);  // no register holds it
  return warp / kKvHeadsPerCta * kWarpLanes + lane_index();
}

template <typename Smem>
__device__ inline void combine_warps(const Params& params, const WorkItem& work, int warp,
                                     u32 work_idx, const Softmax& softmax, const Output& output,
                                     SharedMemoryPlan& smem) {
  // Not unrolled, to limit the I-cache footprint.
#pragma unroll 1
  for (int first_row = 0; first_row < work.rows; first_row += Smem::kTileRows) {
#pragma unroll 1
    for (int first_dim = 0; first_dim < kPartDims; first_dim += Smem::kTileDims) {
      named_barrier_sync(NamedBarrier::ConsumersSynced,
                         kConsumerThreads);  // no warp reads the buffer any more
      store_warp_partial<Smem>(first_row, first_dim, warp, softmax, output, smem);
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
      combine_partials<Smem>(params, work, work_idx, first_row, first_dim, thread_in_head(warp),
                             kThreadsPerHead, smem);
      __syncwarp();
    }
  }
}

// Whether the epilogue warps combine an item: one without a combine across CTAs, that another item
// follows. All consumers together finish the last item sooner. After an item that consumers combine
// themselves, they must sync before they store to the buffer again: combine_splits does.
__device__ inline bool uses_epilogue_warps(const WorkItem& work, const ScheduleRange& range,
                                           bool has_next) {
  const bool is_combined = kBatchInvariant ? !ends_part(work, range) : work.num_splits == 1;
  return kUsesEpilogueWarps && is_combined && has_next;
}

// Consumers wait here until the epilogue warps have read the combine buffer.
__device__ inline void wait_for_epilogue(bool& is_epilogue_busy) {
  if (is_epilogue_busy)
    named_barrier_sync(NamedBarrier::PartialsFree, kConsumerThreads + kEpilogueThreads);
  is_epilogue_busy = false;
}

// Publishes the partials of an item to the epilogue warps.
__device__ inline void publish_partials(int warp, const Softmax& softmax, const Output& output,
                                        SharedMemoryPlan& smem) {
  store_warp_partial<CombineSmem>(0, 0, warp, softmax, output, smem);
  named_barrier_arrive(NamedBarrier::PartialsReady, kConsumerThreads + kEpilogueThreads);
}

// Epilogue warps: combine and store the items for which uses_epilogue_warps holds.
__device__ inline void epilogue_loop(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  if (!kUsesEpilogueWarps || !work_pipeline.has(0)) return;
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x) - kFirstEpilogueWarp * kWarpLanes;
#pragma unroll 1
  for (u32 work_idx = 0;; ++work_idx) {
    work_pipeline.wait_full(work_idx + 1);
    const bool has_next = work_pipeline.has(work_idx + 1);
    if (uses_epilogue_warps(work_pipeline.at(work_idx, 0), smem.range, has_next)) {
      named_barrier_sync(NamedBarrier::PartialsReady, kConsumerThreads + kEpilogueThreads);
#pragma unroll 1
      for (int head = 0; head < kKvHeadsPerCta; ++head) {
        combine_partials<CombineSmem>(params, work_pipeline.at(work_idx, head), work_idx, 0, 0,
                                      thread, kEpilogueThreads, smem);
      }
      __syncwarp();
      named_barrier_arrive(NamedBarrier::PartialsFree, kConsumerThreads + kEpilogueThreads);
    }
    if (!has_next) return;
    work_pipeline.release(work_idx);
  }
}
