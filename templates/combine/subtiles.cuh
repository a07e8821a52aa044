// Combine of splits: every reducing CTA reduces one sub-tile of the output.

#pragma once

#include "accumulators.cuh"
#include "combine/partial.cuh"
#include "combine/subtile_frags.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"
#include "softmax/work_rows.cuh"
#include "store_rows.cuh"

// Over the adjacent lanes that share a row.
template <typename Op>
__device__ inline float reduce_lanes(float value, int num_lanes, Op op) {
#pragma unroll 1
  for (int lanes = 1; lanes < num_lanes; lanes *= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Consecutive groups of fragments cover consecutive groups of rows.
constexpr int kNumRowGroups = kBlockM / kRowsPerGroup;

// Max number of rows that a sub-tile of `num_frags` fragments touches; a small one touches one
// group.
__device__ constexpr int rows_per_subtile(int num_frags) {
  if (kFragsPerRowGroup % num_frags == 0) return kRowsPerGroup;
  const int num_groups = (num_frags + kFragsPerRowGroup - 2) / kFragsPerRowGroup + 1;
  return num_groups < kNumRowGroups ? num_groups * kRowsPerGroup : kBlockM;
}

// Partial sums of warps that share fragments. They lie behind the loaded splits, and behind what a
// warp over-reads when it sums four fragments of a smaller sub-tile.
using WarpPartials = float4[kFragsPerStep][kWarpLanes];
constexpr int kWarpPartialsBytes = kPvWarps * static_cast<int>(sizeof(WarpPartials));
__device__ constexpr int warp_partials_offset(int num_splits, int rows, int num_frags) {
  return (num_splits | 1) * rows * static_cast<int>(sizeof(PartialState)) +
         (num_splits * num_frags + kFragsPerStep) * kFragBytes;
}

constexpr int kMinSplits = 2;  // that are combined

// Fewest reducers of so many splits.
__device__ constexpr int min_reducers(int num_splits) {
  return kBatchInvariant ? num_splits : num_splits - 1;
}

// Whether a sub-tile of every split is in shared memory at once.
__device__ constexpr bool subtiles_fit() {
  for (int num_splits = kMinSplits; num_splits <= kMaxRanges; ++num_splits) {
    const int num_frags = frags_per_subtile(min_reducers(num_splits));
    const int offset = warp_partials_offset(num_splits, rows_per_subtile(num_frags), num_frags);
    if (offset + kWarpPartialsBytes > kCombineSmemBytes) return false;
  }
  return true;
}
static_assert(subtiles_fit(), "the combine aliases Q and the KV stages");
static_assert(kFragsPerRowGroup % kFragsPerStep == 0, "fragments of a step share their rows");

constexpr int kLog2PvThreads = kPvThreads == 256 ? 8 : 7;
constexpr int kLog2WarpLanes = 5;
static_assert(kPvThreads == 1 << kLog2PvThreads, "four or eight warps");

// Issues the copies of the partial states of all splits, by groups of rows: whole cache lines.
__device__ inline void load_partial_states(const Params& params, const PartialSlots& slots,
                                           const CombineSmem& combine_smem) {
  const float reciprocal = __fdividef(1.0f, static_cast<float>(combine_smem.num_splits));
  const int end = combine_smem.num_splits * (combine_smem.rows / kRowsPerGroup);
#pragma unroll 1
  for (int i = reload_tid() / kRowsPerGroup; i < end; i += kPvThreads / kRowsPerGroup) {
    // A float division is short, and exact for numbers this small.
    const int row_group = __float2int_rz((static_cast<float>(i) + 0.5f) * reciprocal);
    const int split_idx = i - row_group * combine_smem.num_splits;
    const int row =
        combine_smem.first_row + row_group * kRowsPerGroup + reload_tid() % kRowsPerGroup;
    cp_async_cg_16(shared_address(&combine_smem.state(split_idx, row)),
                   partial_states(params, slots[split_idx]) + row, kChunkBytes);
  }
}

// Of the threads that share a row: all PV threads divided among the rows, at most a warp, and at
// most one for each split.
__device__ inline int log2_threads_of_row(const CombineSmem& combine_smem) {
  const int log2_rows = kWarpLanes - __clz(combine_smem.rows - 1);
  const int log2_splits = kWarpLanes - __clz(combine_smem.num_splits - 1);
  return min(min(kLog2PvThreads - log2_rows, kLog2WarpLanes), log2_splits);
}

// Turns the fp16 scale of every split into its weight in the finished row, and stores the LSE, once
// the states have arrived. Most threads have one split, so loops are not unrolled.
__device__ inline void combine_rows(const Params& params, const WorkItem& work,
                                    const CombineSmem& combine_smem) {
  const int log2_threads = log2_threads_of_row(combine_smem);
  const int threads = 1 << log2_threads;
  const int row_idx = reload_tid() >> log2_threads;
  const int row = combine_smem.first_row + row_idx;
  const float sink = sink_of(params, work, row);
  const float scale = output_scale(params);
  cp_async_wait_group<1>();
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  if (!__any_sync(~0u, row_idx < combine_smem.rows)) return;  // rows are shared by whole warps
  PartialState* states = combine_smem.states(row_idx);
  const int first = reload_tid() & (threads - 1);
  const int end = row_idx < combine_smem.rows ? combine_smem.num_splits : 0;
  float row_max = kEmptyRow.row_max;
#pragma unroll 1
  for (int i = first; i < end; i += threads) row_max = fmaxf(row_max, states[i].row_max);
  row_max = reduce_lanes(row_max, threads, [](float a, float b) { return fmaxf(a, b); });
  float row_sum = 0.0f;
#pragma unroll 1
  for (int i = first; i < end; i += threads) {
    row_sum += states[i].row_sum * weight_of(states[i], row_max);
  }
  row_sum = reduce_lanes(row_sum, threads, [](float a, float b) { return a + b; });
  const RowResult result = result_of(params, {row_max, row_sum}, sink);
  const float factor = result.factor * scale;
#pragma unroll 1
  for (int i = first; i < end; i += threads) {
    const float weight = factor * weight_of(states[i], row_max);
#pragma unroll
    for (int s = 0; s < kNumScales; ++s) states[i].scales[s] *= weight;
  }
  // The sub-tile that holds the first fragment of a row stores its LSE.
  const int row_frag = row / kRowsPerGroup * kFragsPerRowGroup;
  const bool owns_row = combine_smem.first_frag <= row_frag &&
                        row_frag < combine_smem.first_frag + combine_smem.num_frags;
  if (params.lse != nullptr && owns_row && first == 0 && row_idx < combine_smem.rows &&
      row < work.rows) {
    params.lse[global_row(params, work, row)] = result.lse;
  }
}

// Sums four fragments from `first` on over the splits `sharer`, `sharer` + 2^`log2_sharers`, ...
// Fragments behind the sub-tile are undefined.
__device__ inline void sum_frags(const CombineSmem& combine_smem, int first, int sharer,
                                 int log2_sharers, float4 (&totals)[kFragsPerStep]) {
#pragma unroll
  for (int n = 0; n < kFragsPerStep; ++n) totals[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int lane = reload_lane();
  const uint2* values =
      combine_smem.values(sharer) + (first - combine_smem.first_frag) * kWarpLanes + lane;
  const int values_step = combine_smem.num_frags * kWarpLanes << log2_sharers;
  const FragRows rows = frag_rows(first);
  const int scale = scale_of_frag(first);
  const PartialState* state_a = &combine_smem.state(sharer, rows.a);
  const int to_b = (rows.b - rows.a) * (combine_smem.num_splits | 1);  // in the same row group
#pragma unroll 2
  for (int split_idx = sharer; split_idx < combine_smem.num_splits;
       split_idx += 1 << log2_sharers) {
    const float a = state_a->scales[scale];
    const float b = state_a[to_b].scales[scale];
#pragma unroll
    for (int n = 0; n < kFragsPerStep; ++n) {
      totals[n] = accumulate_frag(totals[n], unpack_half4(values[n * kWarpLanes]), a, b);
    }
    values += values_step;
    state_a += 1 << log2_sharers;
  }
}

// Reduces and stores the fragments of a sub-tile, four per step of a warp, or of the
// 2^`log2_sharers` warps that share them: the sub-tile is small then, and a warp has one step.
__device__ inline void combine_frags(const Params& params, const WorkItem& work,
                                     SharedMemoryPlan& smem, const CombineSmem& combine_smem,
                                     int log2_sharers) {
  WarpPartials* warp_partials = reinterpret_cast<WarpPartials*>(
      combine_smem.bytes +
      warp_partials_offset(combine_smem.num_splits, combine_smem.rows, combine_smem.num_frags));
  const int lane = reload_lane();
  const int warp = reload_warp();
  const int sharers = 1 << log2_sharers;
#pragma unroll 1
  for (int i = (warp >> log2_sharers) * kFragsPerStep; i < combine_smem.num_frags;
       i += kPvWarps * kFragsPerStep) {
    float4 totals[kFragsPerStep];
    sum_frags(combine_smem, combine_smem.first_frag + i, warp & (sharers - 1), log2_sharers,
              totals);
    if (log2_sharers == 0) {
      store_frags<kFragsPerStep>(params, work, smem, combine_smem.first_frag + i, totals);
      continue;
    }
#pragma unroll
    for (int n = 0; n < kFragsPerStep; ++n) warp_partials[warp][n][lane] = totals[n];
  }
  if (log2_sharers == 0) return;
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
#pragma unroll 1
  for (int i = warp; i < combine_smem.num_frags; i += kPvWarps) {
    float4 total[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 2
    for (int sharer = 0; sharer < sharers; ++sharer) {
      const int other = (i / kFragsPerStep << log2_sharers) + sharer;
      const float4 value = warp_partials[other][i % kFragsPerStep][lane];
      total[0] = make_float4(total[0].x + value.x, total[0].y + value.y, total[0].z + value.z,
                             total[0].w + value.w);
    }
    store_frags<1>(params, work, smem, combine_smem.first_frag + i, total);
  }
}

// The sub-tile that this CTA reduces. Empty if the CTA is not a reducer.
__device__ inline CombineSmem combine_smem_of_subtile(SharedMemoryPlan& smem,
                                                      const WorkItem& work) {
  const bool is_reducer = work.num_splits >= kMinSplits && work.split_idx < work.num_reducers;
  const int first = is_reducer ? work.split_idx * work.subtile_frags : kNumFrags;
  const int num_frags = min(work.subtile_frags, kNumFrags - first);
  const int first_group = static_cast<u32>(first) / kFragsPerRowGroup;
  const int last_group = static_cast<u32>(first + num_frags - 1) / kFragsPerRowGroup;
  return {smem.query,
          work.num_splits,
          first_group * kRowsPerGroup,
          (last_group + 1 - first_group) * kRowsPerGroup,
          first,
          num_frags};
}

// Reduces a sub-tile, once all of its splits are stored: copies states, then values.
__device__ inline void reduce_subtile(const Params& params, const WorkItem& work,
                                      SharedMemoryPlan& smem, const CombineSmem& combine_smem) {
  const PartialSlots slots(params, work);
  load_partial_states(params, slots, combine_smem);
  cp_async_commit_group();
  const bool holds_own_split = !kBatchInvariant && combine_smem.holds_own_split();
  load_partial_values(params, slots, combine_smem, holds_own_split ? work.split_idx : -1);
  cp_async_commit_group();
  combine_rows(params, work, combine_smem);
  cp_async_wait_group<0>();
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  const int num_groups = ceil_div(combine_smem.num_frags, kFragsPerStep);
  combine_frags(params, work, smem, combine_smem,
                max(__clz(num_groups * 2 - 1) - __clz(kPvWarps), 0));
}
