// Merging many pieces of a unit: every block that has one but the last takes a slice of the result.
// Needs merge.cuh, row_state.cuh; from the consumers task_rows, add_task, store_slice.

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

// Makes the scale of every piece the factor of its halves in the finished row.
__device__ inline void merge_rows(const Params& params, const Item& item, const MergeRoom& room) {
  const int row = fresh_thread() / kThreadsOfRow;
  const int first = fresh_thread() % kThreadsOfRow;
  float reference = -kLargest;
#pragma unroll 4
  for (int piece = first; piece < item.pieces; piece += kThreadsOfRow) {
    reference = fmaxf(reference, room.rows(piece)[row].reference);
  }
  reference = join_lanes(reference, [](float a, float b) { return fmaxf(a, b); });
  float sum = 0.0f;
#pragma unroll 4
  for (int piece = first; piece < item.pieces; piece += kThreadsOfRow) {
    const PartialRow state = room.rows(piece)[row];
    sum += state.sum * ex2_approx(state.reference - reference);
  }
  sum = join_lanes(sum, [](float a, float b) { return a + b; });
  const RowResult result = result_of(params, item, row, {reference, sum});
  const float factor = result.factor * output_scale(params);
#pragma unroll 4
  for (int piece = first; piece < item.pieces; piece += kThreadsOfRow) {
    PartialRow& state = room.rows(piece)[row];
    state.scale *= factor * ex2_approx(state.reference - reference);
  }
  if (params.lse != nullptr && item.piece == 0 && first == 0 && row < item.rows) {
    params.lse[global_row(params, item, row)] = result.lse * params.lse_factor;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
}

// Adds up `kCount` tasks of all pieces at a time, from the one on that this warp has `first`, and
// writes them. Of those behind the last, the last is added up once more.
template <int kCount>
__device__ inline void merge_tasks(const Params& params, const Item& item, const MergeRoom& room,
                                   int begin, int first) {
  const int warp = (begin + first) % kConsumerWarps;
  // Task i * kConsumerWarps + w is float4 i of the threads of warp w.
  int tasks[kCount];
  TaskRows rows[kCount];
  float4 totals[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    tasks[n] = min(first + n * kConsumerWarps, room.tasks - 1);
    rows[n] = task_rows((begin + tasks[n]) / kConsumerWarps, warp);
    totals[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  const uint2* values = room.values(0) + fresh_lane();
#pragma unroll 2
  for (int piece = 0; piece < room.pieces; ++piece) {
    const PartialRow* states = room.rows(piece);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      totals[n] = add_task(totals[n], from_halves(values[tasks[n] * kWarpLanes]),
                           states[rows[n].a].scale, states[rows[n].b].scale);
    }
    values += room.tasks * kWarpLanes;
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const int task = first + n * kConsumerWarps;
    if (task >= room.tasks) break;
    store_slice(params, item, (begin + task) / kConsumerWarps, warp, totals[n]);
  }
}

__device__ inline void merge_slices(const Params& params, const Item& item, SharedMemory& shared) {
  await(params, item, item.pieces);
  const int slices = item.pieces - 1;
  // Who comes last knows that nobody waits any more.
  u32* counters = arrivals(params, item);
  const bool is_last = fresh_thread() == 0 && atomicAdd(counters + 1, 1u) + 1 == slices;
  const int each = ceil_div(kTasks, slices);
  const int first = item.piece * each;
  const int end = min(first + each, kTasks);
  const int at_once = tasks_at_once(item.pieces);
  int round = 0;
  for (int begin = first; begin < end; begin += at_once) {
    const MergeRoom room = {shared.query, item.pieces, min(at_once, end - begin)};
    // Everybody is done with what was brought before.
    if (round > 0) barrier_sync(kConsumerBarrier, kConsumerThreads);
    bring_pieces(params, item, shared, room, 0, begin, round);
    if (round == 0) merge_rows(params, item, room);
    constexpr int kManyTasks = 4;
    if (room.tasks <= kConsumerWarps) {
      if (fresh_warp() < room.tasks) merge_tasks<1>(params, item, room, begin, fresh_warp());
    } else {
#pragma unroll 1
      for (int task = fresh_warp(); task < room.tasks; task += kManyTasks * kConsumerWarps) {
        merge_tasks<kManyTasks>(params, item, room, begin, task);
      }
    }
    ++round;
  }
  if (is_last) {
    counters[0] = 0;
    counters[1] = 0;
  }
}
