// Merging many pieces of a unit: every block that has one but the last takes a slice of the result.
// Needs merge.cuh; from the consumers store_slice.

struct MergedRow {
  float reference = -kLargest;
  float sum = 0.0f;

  __device__ void add(float other, float other_sum) {
    const float larger = fmaxf(reference, other);
    sum = sum * ex2_approx(reference - larger) + other_sum * ex2_approx(other - larger);
    reference = larger;
  }
};

// Puts the factor of every piece in the finished row in place of the piece's reference.
__device__ inline void merge_rows(const Params& params, const Item& item, const MergeRoom& room) {
  constexpr int kThreadsOfRow = kConsumerThreads / kRows;
  const int row = fresh_thread() / kThreadsOfRow;
  const int first = fresh_thread() % kThreadsOfRow;
  MergedRow merged;
  for (int piece = first; piece < item.pieces; piece += kThreadsOfRow) {
    const float2 state = room.rows(piece)[row];
    merged.add(state.x, state.y);
  }
#pragma unroll
  for (int lanes = 1; lanes < kThreadsOfRow; lanes *= 2) {
    const float other = __shfl_xor_sync(~0u, merged.reference, lanes);
    const float other_sum = __shfl_xor_sync(~0u, merged.sum, lanes);
    merged.add(other, other_sum);
  }
  const RowResult result = result_of(params, item, row, {merged.reference, merged.sum});
  const float factor = result.factor * output_scale(params);
  for (int piece = first; piece < item.pieces; piece += kThreadsOfRow) {
    float& reference = room.rows(piece)[row].x;
    reference = factor * ex2_approx(reference - merged.reference);
  }
  if (params.lse != nullptr && item.piece == 0 && first == 0 && row < item.rows) {
    params.lse[global_row(params, item, row)] = result.lse * params.lse_factor;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
}

__device__ inline void merge_slices(const Params& params, const Item& item, SharedMemory& shared) {
  await(params, item, item.pieces);
  const int slices = item.pieces - 1;
  const int each = ceil_div(kTasks, slices);
  const int first = item.piece * each;
  const int end = min(first + each, kTasks);
  const int at_once = tasks_at_once(item.pieces);
  u32 phase = 0;
  for (int begin = first; begin < end; begin += at_once) {
    const MergeRoom room = {shared.query, item.pieces, min(at_once, end - begin)};
    // Everybody is done with what was brought before.
    if (phase > 0) barrier_sync(kConsumerBarrier, kConsumerThreads);
    bring_pieces(params, item, shared, room, 0, begin, phase);
    if (phase == 0) merge_rows(params, item, room);
    for (int task = fresh_warp(); task < room.tasks; task += kConsumerWarps) {
      // Task i * kConsumerWarps + w is float4 i of the threads of warp w.
      const int index = (begin + task) / kConsumerWarps;
      const int warp = (begin + task) % kConsumerWarps;
      const TaskRows rows = task_rows(index, warp);
      float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
      for (int piece = 0; piece < item.pieces; ++piece) {
        total = add_task(total, room.values(piece)[task * kWarpLanes + fresh_lane()],
                         room.rows(piece)[rows.a].x, room.rows(piece)[rows.b].x);
      }
      store_slice(params, item, index, warp, total);
    }
    ++phase;
  }
  // The last to be done leaves the counters as they were.
  u32* counters = arrivals(params, item);
  if (fresh_thread() == 0 && atom_add_acq_rel_gpu(counters + 1, 1) + 1 == slices) {
    counters[0] = 0;
    counters[1] = 0;
  }
}
