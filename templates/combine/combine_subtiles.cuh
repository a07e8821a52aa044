// Merging three pieces and more of a unit: every block that is a merger takes a slice of the
// result.

#pragma once

#include "accumulators.cuh"
#include "combine/partial_out.cuh"
#include "combine/partial_state.cuh"
#include "combine/reduce_group.cuh"
#include "combine/subtile_size.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ex2.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_result.cuh"
#include "softmax/row_state.cuh"
#include "store_rows.cuh"

// Over the lanes that share a row, which are neighbours.
template <typename Join>
__device__ inline float join_lanes(float value, int sharing, Join join) {
#pragma unroll 1
  for (int lanes = 1; lanes < sharing; lanes *= 2) {
    value = join(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Groups of tasks, one after the other, have the groups of rows, in some families all of them
// twice.
static_assert((kRows & (kRows - 1)) == 0, "rows are counted modulo all of them");
constexpr int kGroupsOfRows = kRows / kRowsOfGroup;

// The rows that a slice of so many tasks touches at the most: small ones those of one group.
__device__ constexpr int rows_of_slice(int tasks) {
  if (kTasksOfGroup % tasks == 0) return kRowsOfGroup;
  const int groups = (tasks + kTasksOfGroup - 2) / kTasksOfGroup + 1;
  return groups < kGroupsOfRows ? groups * kRowsOfGroup : kRows;
}

// What sharers of tasks have of them, behind what has been brought, and behind what a warp reads
// there that adds up four tasks of a slice of fewer.
using SharedTotals = float4[kTasksTogether][kWarpLanes];
constexpr int kSharedTotalsBytes = kConsumerWarps * static_cast<int>(sizeof(SharedTotals));
__device__ constexpr int shared_totals_offset(int pieces, int rows, int tasks) {
  return (pieces | 1) * rows * static_cast<int>(sizeof(PartialRow)) +
         (pieces * tasks + kTasksTogether) * kTaskBytes;
}

__device__ constexpr bool slices_fit() {
  for (int pieces = 3; pieces <= kMostSpans; ++pieces) {
    const int tasks = tasks_of_slice(pieces - 1);
    const int offset = shared_totals_offset(pieces, rows_of_slice(tasks), tasks);
    if (offset + kSharedTotalsBytes > kRoomBytes) return false;
  }
  return true;
}
static_assert(slices_fit(), "a slice of every piece comes at once");
static_assert(kTasksOfGroup % kTasksTogether == 0, "tasks that are added together have one row");

constexpr int kLog2ConsumerThreads = kConsumerThreads == 256 ? 8 : 7;
static_assert(kConsumerThreads == 1 << kLog2ConsumerThreads, "four or eight warps");

// Begins to copy the rows of all pieces, of each piece whole lines: group by group of rows.
__device__ inline void begin_states(const Params& params, const PiecePlaces& places,
                                    const MergeRoom& room) {
  const float share = __fdividef(1.0f, static_cast<float>(room.pieces));
  const int end = room.pieces * (room.rows / kRowsOfGroup);
#pragma unroll 1
  for (int i = fresh_thread() / kRowsOfGroup; i < end; i += kConsumerThreads / kRowsOfGroup) {
    // In floats, in which such small numbers lose nothing, a division is short.
    const int group = __float2int_rz((static_cast<float>(i) + 0.5f) * share);
    const int piece = i - group * room.pieces;
    const int row = room.row_at(group * kRowsOfGroup + fresh_thread() % kRowsOfGroup);
    cp_async_cg_16(shared_address(&room.state(piece, row)),
                   partial_rows(params, places[piece]) + row, kChunkBytes);
  }
}

// As many threads as there are see to each row, and no more than a warp has.
__device__ constexpr int log2_threads_of_row(int log2_rows) {
  return kLog2ConsumerThreads - log2_rows < 5 ? kLog2ConsumerThreads - log2_rows : 5;
}

// How many pieces of a row a thread sees to at the most.
__device__ constexpr int most_pieces_of_thread() {
  int most = 1;
  for (int pieces = 3; pieces <= kMostSpans; ++pieces) {
    const int rows = rows_of_slice(tasks_of_slice(pieces - 1));
    int log2_rows = 0;
    while (1 << log2_rows < rows) ++log2_rows;
    const int own = ceil_div(pieces, 1 << log2_threads_of_row(log2_rows));
    if (own > most) most = own;
  }
  return most;
}
constexpr int kMostOwnPieces = most_pieces_of_thread();

// Makes the scale of every piece the factor of its halves in the finished row.
__device__ inline void merge_rows(const Params& params, const Item& item, const MergeRoom& room) {
  const int log2_threads = log2_threads_of_row(32 - __clz(room.rows - 1));
  const int threads = 1 << log2_threads;
  const int place = fresh_thread() >> log2_threads;
  if (!__any_sync(~0u, place < room.rows)) return;  // rows are shared by whole warps
  const int row = room.row_at(place);
  const int first = fresh_thread() & (threads - 1);
  // Those behind the last piece count for nothing.
  PartialRow states[kMostOwnPieces];
  float reference = -kLargest;
#pragma unroll
  for (int i = 0; i < kMostOwnPieces; ++i) {
    const int piece = first + i * threads;
    states[i] = room.states(place)[min(piece, room.pieces - 1)];
    if (piece >= room.pieces) states[i].sum = 0.0f;
    reference = fmaxf(reference, states[i].reference);
  }
  reference = join_lanes(reference, threads, [](float a, float b) { return fmaxf(a, b); });
  float weights[kMostOwnPieces];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostOwnPieces; ++i) {
    weights[i] = ex2_approx(states[i].reference - reference);
    sum += states[i].sum * weights[i];
  }
  sum = join_lanes(sum, threads, [](float a, float b) { return a + b; });
  const RowResult result = result_of(params, item, row, {reference, sum});
  const float factor = result.factor * output_scale(params);
#pragma unroll
  for (int i = 0; i < kMostOwnPieces; ++i) {
    const int piece = first + i * threads;
    if (piece >= room.pieces) continue;
#pragma unroll
    for (int scale = 0; scale < kScales; ++scale) {
      room.states(place)[piece].scales[scale] = states[i].scales[scale] * (factor * weights[i]);
    }
  }
  // The slice that a row begins in tells of it.
  const int row_task = row / kRowsOfGroup * kTasksOfGroup;
  const bool is_begun = room.first_task <= row_task && row_task < room.first_task + room.tasks;
  if (params.lse != nullptr && is_begun && first == 0 && row < item.rows) {
    params.lse[global_row(params, item, row)] = result.lse;
  }
}

// Adds up the four tasks from `first` on, of some pieces: of the one that is `sharer`, and every
// 2^`log2_sharers` from there. Those behind the slice are anything.
__device__ inline void add_tasks(const MergeRoom& room, int first, int sharer, int log2_sharers,
                                 float4 (&totals)[kTasksTogether]) {
#pragma unroll
  for (int n = 0; n < kTasksTogether; ++n) totals[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int lane = fresh_lane();
  const uint2* values = room.values(sharer) + (first - room.first_task) * kWarpLanes + lane;
  const int values_step = room.tasks * kWarpLanes << log2_sharers;
  const TaskRows rows = task_rows(first);
  const int scale = scale_of_task(first);
  const PartialRow* state_a = &room.state(sharer, rows.a);
  const int to_b = (rows.b - rows.a) * (room.pieces | 1);  // of the same group
#pragma unroll 1
  for (int piece = sharer; piece < room.pieces; piece += 1 << log2_sharers) {
    const float a = state_a->scales[scale];
    const float b = state_a[to_b].scales[scale];
#pragma unroll
    for (int n = 0; n < kTasksTogether; ++n) {
      totals[n] = add_task(totals[n], from_halves(values[n * kWarpLanes]), a, b);
    }
    values += values_step;
    state_a += 1 << log2_sharers;
  }
}

// Adds up the tasks of a slice, four together by each warp, and writes them.
__device__ inline void merge_tasks(const Params& params, const Item& item, SharedMemory& shared,
                                   const MergeRoom& room) {
#pragma unroll 1
  for (int i = fresh_warp() * kTasksTogether; i < room.tasks;
       i += kConsumerWarps * kTasksTogether) {
    float4 totals[kTasksTogether];
    add_tasks(room, room.first_task + i, 0, 0, totals);
    store_tasks<kTasksTogether>(params, item, shared, room.first_task + i, totals);
  }
}

// The same where there are so few tasks that 2^`log2_sharers` warps share four of them.
__device__ inline void merge_shared_tasks(const Params& params, const Item& item,
                                          SharedMemory& shared, const MergeRoom& room,
                                          int log2_sharers) {
  SharedTotals* all_totals = reinterpret_cast<SharedTotals*>(
      room.bytes + shared_totals_offset(room.pieces, room.rows, room.tasks));
  const int lane = fresh_lane();
  const int warp = fresh_warp();
  const int sharers = 1 << log2_sharers;
  const int own = (warp >> log2_sharers) * kTasksTogether;
  if (own < room.tasks) {
    float4 totals[kTasksTogether];
    add_tasks(room, room.first_task + own, warp & (sharers - 1), log2_sharers, totals);
#pragma unroll
    for (int n = 0; n < kTasksTogether; ++n) all_totals[warp][n][lane] = totals[n];
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
#pragma unroll 1
  for (int i = warp; i < room.tasks; i += kConsumerWarps) {
    float4 total[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 2
    for (int sharer = 0; sharer < sharers; ++sharer) {
      const int other = (i / kTasksTogether << log2_sharers) + sharer;
      const float4 value = all_totals[other][i % kTasksTogether][lane];
      total[0] = make_float4(total[0].x + value.x, total[0].y + value.y, total[0].z + value.z,
                             total[0].w + value.w);
    }
    store_tasks<1>(params, item, shared, room.first_task + i, total);
  }
}

// What of all pieces belongs to the tasks that the block of a piece merges: none if it is no
// merger, or if there are no more than two pieces.
__device__ inline MergeRoom room_of_slice(SharedMemory& shared, const Item& item) {
  const bool merges = item.pieces > 2 && item.piece < item.mergers;
  const int first = merges ? item.piece * item.slice_tasks : kTasks;
  const int tasks = min(item.slice_tasks, kTasks - first);
  const u32 first_group = static_cast<u32>(first) / kTasksOfGroup;
  const u32 last_group = static_cast<u32>(first + tasks - 1) / kTasksOfGroup;
  const u32 first_row = first_group % kGroupsOfRows * kRowsOfGroup;
  const u32 rows = min((last_group + 1 - first_group) * kRowsOfGroup, static_cast<u32>(kRows));
  return {shared.query,           item.pieces, static_cast<int>(first_row),
          static_cast<int>(rows), first,       tasks};
}

__device__ inline void merge_slices(const Params& params, const Item& item, SharedMemory& shared,
                                    const MergeRoom& room) {
  const Crew all = {-1};
  const PiecePlaces places(params, item);
  await(params, item, all);
  if (room.tasks <= 0) return;
  begin_states(params, places, room);
  cp_async_commit_group();
  begin_values(params, places, all, room, 0, room.keeps_own() ? item.piece : -1);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  merge_rows(params, item, room);
  cp_async_wait_group<0>();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  const int groups = ceil_div(room.tasks, kTasksTogether);
  if (groups * 2 > kConsumerWarps) {
    merge_tasks(params, item, shared, room);
  } else {
    merge_shared_tasks(params, item, shared, room, __clz(groups * 2 - 1) - __clz(kConsumerWarps));
  }
}
