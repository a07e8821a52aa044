// Merging three pieces and more of a unit: every block that is a merger takes a slice of the
// result. Needs merge.cuh, row_state.cuh; from the consumers task_rows, add_task, store_tasks.

// Over the lanes that share a row, which are neighbours.
constexpr int kThreadsOfRow = kConsumerThreads / kRows;

template <typename Join>
__device__ inline float join_lanes(float value, Join join) {
#pragma unroll
  for (int lanes = 1; lanes < kThreadsOfRow; lanes *= 2) {
    value = join(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// A slice is as many tasks as make all mergers equally busy. Of many, a warp adds up some together,
// whose elements lie side by side in the output.
constexpr int kTasksTogether = 4;
constexpr int kManyTasks = kTasksTogether * kConsumerWarps;

__device__ constexpr int tasks_of_slice(int mergers) {
  const int tasks = ceil_div(kTasks, mergers);
  return tasks < kManyTasks ? tasks : ceil_div(tasks, kTasksTogether) * kTasksTogether;
}

// The rows that a slice of so many tasks touches at the most.
__device__ constexpr int rows_of_slice(int tasks) {
  const int groups = (tasks + kTasksOfGroup - 2) / kTasksOfGroup + 1;
  return groups * kRowsOfGroup < kRows ? groups * kRowsOfGroup : kRows;
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

// Makes the scale of every piece the factor of its halves in the finished row.
__device__ inline void merge_rows(const Params& params, const Item& item, const MergeRoom& room) {
  const int row = fresh_thread() / kThreadsOfRow;
  const int first = fresh_thread() % kThreadsOfRow;
  if (room.first_row <= row && row < room.first_row + room.rows) {
    float reference = -kLargest;
#pragma unroll 4
    for (int piece = first; piece < room.pieces; piece += kThreadsOfRow) {
      reference = fmaxf(reference, room.state(piece, row).reference);
    }
    reference = join_lanes(reference, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0.0f;
#pragma unroll 4
    for (int piece = first; piece < room.pieces; piece += kThreadsOfRow) {
      const PartialRow& state = room.state(piece, row);
      sum += state.sum * ex2_approx(state.reference - reference);
    }
    sum = join_lanes(sum, [](float a, float b) { return a + b; });
    const RowResult result = result_of(params, item, row, {reference, sum});
    const float factor = result.factor * output_scale(params);
#pragma unroll 4
    for (int piece = first; piece < room.pieces; piece += kThreadsOfRow) {
      PartialRow& state = room.state(piece, row);
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

// Adds up `kCount` tasks of all pieces, from `first` on, and writes them; the first row of the
// output that they belong to, and of each piece its factors, are the same for all. Of those behind
// the last, the last is added up once more.
template <int kCount>
__device__ inline void merge_tasks(const Params& params, const Item& item, SharedMemory& shared,
                                   const MergeRoom& room, int first) {
  int offsets[kCount];
  TaskRows rows[kCount];
  float4 totals[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    offsets[n] = min(first - room.first_task + n, room.tasks - 1) * kWarpLanes;
    rows[n] = task_rows(first + n);
    totals[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const int scale = scale_of_task(first);
  const uint2* values = room.values(0) + fresh_lane();
#pragma unroll 2
  for (int piece = 0; piece < room.pieces; ++piece) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      totals[n] = add_task(totals[n], from_halves(values[offsets[n]]),
                           room.state(piece, rows[n].a).scales[scale],
                           room.state(piece, rows[n].b).scales[scale]);
    }
    values += room.tasks * kWarpLanes;
  }
  store_tasks<kCount>(params, item, shared, first, room.first_task + room.tasks - first, totals);
}

__device__ inline void merge_slices(const Params& params, const Item& item, SharedMemory& shared) {
  const Crew all = {-1};
  const int each = tasks_of_slice(item.mergers);
  const int first = item.piece * each;
  const int end = min(first + each, kTasks);
  const int first_group = first / kTasksOfGroup;
  const int groups = (end - 1) / kTasksOfGroup + 1 - first_group;
  const MergeRoom room = {shared.query,          item.pieces, first_group * kRowsOfGroup,
                          groups * kRowsOfGroup, first,       end - first};
  await(params, item, all, item.pieces);
  const bool is_last = is_last_merger(params, item, all);
  if (room.tasks > 0) {
    bring_pieces(params, item, all, room, 0);
    merge_rows(params, item, room);
    if (each < kManyTasks) {
#pragma unroll 1
      for (int task = first + fresh_warp(); task < end; task += kConsumerWarps) {
        merge_tasks<1>(params, item, shared, room, task);
      }
    } else {
#pragma unroll 1
      for (int task = first + fresh_warp() * kTasksTogether; task < end; task += kManyTasks) {
        merge_tasks<kTasksTogether>(params, item, shared, room, task);
      }
    }
  }
  if (is_last) reset_arrivals(params, item);
}
