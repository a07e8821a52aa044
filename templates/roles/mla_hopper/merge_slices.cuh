// Merging three pieces and more of a unit: every block that is a merger takes a slice of the
// result. Needs merge.cuh, slices.cuh, row_state.cuh; from the consumers how tasks are ordered,
// which rows and scale they have, add_task and store_tasks.

// Over the lanes that share a row, which are neighbours.
template <typename Join>
__device__ inline float join_lanes(float value, int sharing, Join join) {
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const float joined = join(value, __shfl_xor_sync(~0u, value, lanes));
    value = lanes < sharing ? joined : value;
  }
  return value;
}

// Groups of tasks, one after the other, have the groups of rows, in some families all of them
// twice.
constexpr int kGroupsOfRows = kRows / kRowsOfGroup;

// The rows that a slice of so many tasks touches at the most.
__device__ constexpr int rows_of_slice(int tasks) {
  const int groups = (tasks + kTasksOfGroup - 2) / kTasksOfGroup + 1;
  return kTasks == kGroupsOfRows * kTasksOfGroup && groups < kGroupsOfRows ? groups * kRowsOfGroup
                                                                           : kRows;
}

__device__ constexpr bool slices_fit() {
  for (int pieces = 3; pieces <= kMostSpans; ++pieces) {
    const int tasks = tasks_of_slice(pieces - 1);
    const int rows_bytes = rows_of_slice(tasks) * static_cast<int>(sizeof(PartialRow));
    if (pieces * (rows_bytes + tasks * kTaskBytes) > kRoomBytes) return false;
  }
  return true;
}
static_assert(slices_fit(), "a slice of every piece comes at once");

constexpr int kLog2ConsumerThreads = kConsumerThreads == 256 ? 8 : 7;
static_assert(kConsumerThreads == 1 << kLog2ConsumerThreads, "four or eight warps");

// Makes the scale of every piece the factor of its halves in the finished row.
__device__ inline void merge_rows(const Params& params, const Item& item, const MergeRoom& room) {
  // As many threads as there are for each row, and no more than a warp has.
  const int log2_rows = 32 - __clz(room.rows - 1);
  const int log2_threads = min(kLog2ConsumerThreads - log2_rows, 5);
  const int threads = 1 << log2_threads;
  const int row = room.first_row + (fresh_thread() >> log2_threads);
  if (row < room.first_row + room.rows) {
    const int first = fresh_thread() & (threads - 1);
    PartialRow* states = &room.state(first, row);
    const int step = threads * room.rows;
    const int count = (room.pieces - first + threads - 1) >> log2_threads;
    float reference = -kLargest;
#pragma unroll 1
    for (int i = 0; i < count; ++i) reference = fmaxf(reference, states[i * step].reference);
    reference = join_lanes(reference, threads, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      sum += states[i * step].sum * ex2_approx(states[i * step].reference - reference);
    }
    sum = join_lanes(sum, threads, [](float a, float b) { return a + b; });
    const RowResult result = result_of(params, item, row, {reference, sum});
    const float factor = result.factor * output_scale(params);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      PartialRow& state = states[i * step];
      const float weight = factor * ex2_approx(state.reference - reference);
#pragma unroll
      for (int scale = 0; scale < kScales; ++scale) state.scales[scale] *= weight;
    }
    // The slice that a row begins in tells of it.
    const int row_task = row / kRowsOfGroup * kTasksOfGroup;
    const bool is_begun = room.first_task <= row_task && row_task < room.first_task + room.tasks;
    if (params.lse != nullptr && is_begun && first == 0 && row < item.rows) {
      params.lse[global_row(params, item, row)] = result.lse * params.lse_factor;
    }
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
}

// Adds up `kCount` tasks of the same rows, from `first` on, of some pieces: of the one that is
// `sharer`, and every 2^`log2_sharers` from there.
template <int kCount>
__device__ inline void add_tasks(const MergeRoom& room, int first, int sharer, int log2_sharers,
                                 float4 (&totals)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) totals[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const uint2* values = room.values(sharer) + (first - room.first_task) * kWarpLanes + fresh_lane();
  const int values_step = room.tasks * kWarpLanes << log2_sharers;
  const TaskRows rows = task_rows(first);
  const int scale = scale_of_task(first);
  const PartialRow* state_a = &room.state(sharer, rows.a);
  const PartialRow* state_b = &room.state(sharer, rows.b);
  const int states_step = room.rows << log2_sharers;
  const int count = (room.pieces - sharer + (1 << log2_sharers) - 1) >> log2_sharers;
#pragma unroll kCount == 1 ? 2 : 1
  for (int i = 0; i < count; ++i) {
    const float factor_a = state_a->scales[scale];
    const float factor_b = state_b->scales[scale];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      totals[n] = add_task(totals[n], from_halves(values[n * kWarpLanes]), factor_a, factor_b);
    }
    values += values_step;
    state_a += states_step;
    state_b += states_step;
  }
}

// Adds what neighbouring warps have of the same task, for the first of them; where the pieces were.
__device__ inline void join_sharers(const MergeRoom& room, int sharer, int sharers, float4& total) {
  float4* totals = reinterpret_cast<float4*>(room.bytes) + fresh_thread();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  *totals = total;
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (sharer > 0) return;
#pragma unroll 1
  for (int other = 1; other < sharers; ++other) {
    const float4 value = totals[other * kWarpLanes];
    total = make_float4(total.x + value.x, total.y + value.y, total.z + value.z, total.w + value.w);
  }
}

// What warps have to tell each other takes as long as so many pieces.
constexpr int kManyPieces = 32;

// Adds up the tasks of a slice of few, each by a warp or, of many pieces and where there are more
// warps than tasks, by two or four, and writes them.
__device__ inline void merge_few_tasks(const Params& params, const Item& item, SharedMemory& shared,
                                       const MergeRoom& room) {
  int log2_sharers =
      room.tasks * 2 > kConsumerWarps ? 0 : (room.tasks * 4 > kConsumerWarps ? 1 : 2);
  if (room.pieces < kManyPieces) log2_sharers = 0;
  const int sharers = 1 << log2_sharers;
  const int sharer = fresh_warp() & (sharers - 1);
  const int step = kConsumerWarps >> log2_sharers;
  const int end = sharers > 1 ? step : room.tasks;  // where they share, all warps meet
#pragma unroll 1
  for (int i = fresh_warp() >> log2_sharers; i < end; i += step) {
    float4 total[1];
    add_tasks<1>(room, room.first_task + min(i, room.tasks - 1), sharer, log2_sharers, total);
    if (sharers > 1) join_sharers(room, sharer, sharers, total[0]);
    if (sharer == 0 && i < room.tasks) {
      store_tasks<1>(params, item, shared, room.first_task + i, total);
    }
  }
}

// And of many, some together by each warp.
__device__ inline void merge_many_tasks(const Params& params, const Item& item,
                                        SharedMemory& shared, const MergeRoom& room) {
#pragma unroll 1
  for (int i = fresh_warp() * kTasksTogether; i < room.tasks; i += kManyTasks) {
    float4 totals[kTasksTogether];
    add_tasks<kTasksTogether>(room, room.first_task + i, 0, 0, totals);
    store_tasks<kTasksTogether>(params, item, shared, room.first_task + i, totals);
  }
}

// What of all pieces belongs to the tasks of a slice.
__device__ inline MergeRoom room_of_slice(SharedMemory& shared, int pieces, int first, int tasks) {
  const u32 first_group = static_cast<u32>(first) / kTasksOfGroup;
  const u32 last_group = static_cast<u32>(first + tasks - 1) / kTasksOfGroup;
  // Where groups of rows begin anew, it is all rows.
  const bool is_whole = first_group / kGroupsOfRows != last_group / kGroupsOfRows;
  const u32 first_row = is_whole ? 0 : first_group % kGroupsOfRows * kRowsOfGroup;
  const u32 rows = is_whole ? kRows : (last_group + 1 - first_group) * kRowsOfGroup;
  return {shared.query, pieces, static_cast<int>(first_row), static_cast<int>(rows), first, tasks};
}

__device__ inline void merge_slices(const Params& params, const Item& item, SharedMemory& shared) {
  const Crew all = {-1};
  const int first = item.piece * item.slice_tasks;
  const int tasks = min(item.slice_tasks, kTasks - first);
  await(params, item, all);
  if (tasks <= 0) return;
  const MergeRoom room = room_of_slice(shared, item.pieces, first, tasks);
  bring_pieces(params, item, all, room, 0);
  merge_rows(params, item, room);
  if (item.slice_tasks < kManyTasks) {
    merge_few_tasks(params, item, shared, room);
  } else {
    merge_many_tasks(params, item, shared, room);
  }
}
