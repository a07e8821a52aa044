// Merging the pieces of a unit. Needs SharedMemory, Item, blocks/row_result.cuh, ptx/ld.cuh,
// ptx/atom.cuh, ptx/fence.cuh, ptx/cp_async_bulk.cuh; and from the consumers Accumulators, with the
// rows each belongs to.

// A piece is left in the workspace as it is in registers: float4 i of thread t at i *
// kConsumerThreads + t; and of each row its reference, in log2 units, and its sum. Each block of
// the grid has two places: for the piece that its span begins with, and for the one it ends with.
constexpr int kFewPieces = 2;  // so many are merged by the owner, more by all

__device__ inline int first_place(int block) { return block * 2; }
__device__ inline int last_place(int block) { return block * 2 + 1; }

__device__ inline float4* partial_values(const Params& params, int place) {
  return reinterpret_cast<float4*>(params.partial_out) +
         static_cast<i64>(place) * kAccumulators * kConsumerThreads;
}

__device__ inline float2* partial_rows(const Params& params, int place) {
  return reinterpret_cast<float2*>(params.partial_rows) + place * kRows;
}

// Where another piece of the same unit lies. Spans are in the opposite order of blocks.
__device__ inline int place_of_piece(const Params& params, const Item& item, int piece) {
  return piece == 0 ? last_place(item.owner) : first_place(item.owner - piece * params.team_size);
}

__device__ inline u32* arrivals(const Params& params, const Item& item) {
  return params.counters + item.owner * 2;
}

// All consumer threads have written; tells those who wait.
__device__ inline void announce(const Params& params, const Item& item) {
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (fresh_thread() == 0) atom_add_acq_rel_gpu(arrivals(params, item), 1);
}

__device__ inline void await(const Params& params, const Item& item, u32 count) {
  if (fresh_thread() == 0) {
    while (ld_acquire_gpu(arrivals(params, item)) != count) {
    }
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
}

__device__ inline void store_partial(const Params& params, int place,
                                     const Accumulators& accumulators,
                                     const RowState (&rows)[kOwnRows]) {
  float4* values = partial_values(params, place) + fresh_thread();
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i)
    values[i * kConsumerThreads] = accumulator(accumulators, i);
  float2* target = partial_rows(params, place);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    if (is_row_writer()) target[own_row(r)] = make_float2(rows[r].reference, rows[r].sum);
  }
}

// A task is one float4 of every thread of a warp, over all pieces; a slice is as many tasks as make
// all blocks equally busy.
constexpr int kTasks = kAccumulators * kConsumerWarps;
constexpr int kTaskBytes = kWarpLanes * sizeof(float4);
constexpr int kRowsBytes = kRows * sizeof(float2);  // of a piece

// What a block brings of other pieces, where query and tokens were: no item follows. First the rows
// of every piece, then as many of its tasks as there is room for.
struct MergeRoom {
  unsigned char* bytes;
  int pieces;
  int tasks;

  __device__ float2* rows(int piece) const {
    return reinterpret_cast<float2*>(bytes) + piece * kRows;
  }
  __device__ float4* values(int piece) const {
    return reinterpret_cast<float4*>(bytes + pieces * kRowsBytes) + piece * tasks * kWarpLanes;
  }
};

constexpr int kRoomBytes = sizeof(SharedMemory::query) + sizeof(SharedMemory::tokens);

// How many tasks there is room for at a time.
__device__ constexpr int tasks_at_once(int pieces) {
  return (kRoomBytes / pieces - kRowsBytes) / kTaskBytes;
}
static_assert((kRoomBytes - kRowsBytes) / kTaskBytes >= kTasks, "the only other piece comes whole");
static_assert((kRoomBytes / kMostSpans - kRowsBytes) / kTaskBytes >= 1, "some of each piece comes");

// Copies are waited for once: the latency of what other blocks have just written is long. `phase`
// counts what has been brought before; the first time rows come, too.
__device__ inline void bring_pieces(const Params& params, const Item& item, SharedMemory& shared,
                                    const MergeRoom& room, int first_piece, int first_task,
                                    u32 phase) {
  const u32 full = shared_address(&shared.merge_full);
  const u32 rows_bytes = phase == 0 ? kRowsBytes : 0;
  if (fresh_thread() == 0) {
    mbarrier_arrive_expect_tx(full, room.pieces * (rows_bytes + room.tasks * kTaskBytes));
  }
  fence_proxy_async_all();
  for (int piece = fresh_thread(); piece < room.pieces; piece += kConsumerThreads) {
    const int place = place_of_piece(params, item, first_piece + piece);
    if (phase == 0) {
      cp_async_bulk(shared_address(room.rows(piece)), partial_rows(params, place), kRowsBytes,
                    full);
    }
    cp_async_bulk(shared_address(room.values(piece)),
                  partial_values(params, place) + first_task * kWarpLanes, room.tasks * kTaskBytes,
                  full);
  }
  wait_for(shared.merge_full, phase % 2);
}

// The owner adds the only other piece to its own, which is in registers.
__device__ inline void fold_piece(const Params& params, const Item& item, SharedMemory& shared,
                                  Accumulators& accumulators, RowState (&rows)[kOwnRows]) {
  await(params, item, 1);
  const MergeRoom room = {shared.query, 1, kTasks};
  bring_pieces(params, item, shared, room, 1, 0, 0);
  if (fresh_thread() == 0) *arrivals(params, item) = 0;
  float own_weights[kOwnRows];
  float weights[kOwnRows];
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    const float2 other = room.rows(0)[own_row(r)];
    const float largest = fmaxf(rows[r].reference, other.x);
    own_weights[r] = ex2_approx(rows[r].reference - largest);
    weights[r] = ex2_approx(other.x - largest);
    rows[r] = {largest, rows[r].sum * own_weights[r] + other.y * weights[r]};
  }
  const float4* values = room.values(0) + fresh_thread();
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const float4 own = weighted(accumulator(accumulators, i), own_weights, i);
    const float4 other = weighted(values[i * kConsumerThreads], weights, i);
    set_accumulator(
        accumulators, i,
        make_float4(own.x + other.x, own.y + other.y, own.z + other.z, own.w + other.w));
    if (i % 4 == 3) __syncwarp();  // there are no registers for more at a time
  }
}
