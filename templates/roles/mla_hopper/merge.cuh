// The pieces of a unit: how they are left in the workspace, brought from there, and two of them
// added. Needs SharedMemory, Item, row_state.cuh, partial_row.cuh, crew.cuh,
// blocks/fresh_thread.cuh, ptx/barrier.cuh, ptx/cp_async.cuh, ptx/cvt.cuh, ptx/ld.cuh, ptx/red.cuh;
// and from the consumers Accumulators, OwnRows, with the rows each belongs to, their tasks,
// scales_of_rows and store_states.

// A task is one float4 of every thread of a warp. A piece is left in the workspace task by task, as
// four halves a thread, for what is written and read is what merging costs; and each row's state.
// Each block of the grid has two places: for the piece that its span begins with, and for the one
// it ends with.
constexpr int kTaskBytes = kWarpLanes * sizeof(uint2);

__device__ inline int first_place(int block) { return block * 2; }
__device__ inline int last_place(int block) { return block * 2 + 1; }

__device__ inline uint2* partial_values(const Params& params, int place) {
  return reinterpret_cast<uint2*>(params.partial_out) +
         static_cast<u32>(place * kTasks * kWarpLanes);
}

__device__ inline PartialRow* partial_rows(const Params& params, int place) {
  return reinterpret_cast<PartialRow*>(params.partial_rows) + place * kRows;
}

// Where this thread's values are among those of all tasks.
__device__ inline int own_values() {
  return first_task_of(fresh_warp()) * kWarpLanes + fresh_lane();
}

__device__ inline uint2 to_halves(float4 value) {
  return make_uint2(cvt_rn_x2_f32(Fp16{}, value.y, value.x),
                    cvt_rn_x2_f32(Fp16{}, value.w, value.z));
}

__device__ inline float4 from_halves(uint2 halves) {
  return make_float4(cvt_f32(Fp16{}, static_cast<u16>(halves.x)),
                     cvt_f32(Fp16{}, static_cast<u16>(halves.x >> 16)),
                     cvt_f32(Fp16{}, static_cast<u16>(halves.y)),
                     cvt_f32(Fp16{}, static_cast<u16>(halves.y >> 16)));
}

// Where another piece of the same unit lies. Spans are in the opposite order of blocks.
__device__ inline int place_of_piece(const Params& params, const Item& item, int piece) {
  return piece == 0 ? last_place(item.owner) : first_place(item.owner - piece * params.team_size);
}

// How many crews leave a piece, or one half of it, for others: of two pieces each merger's half
// comes from the other block.
__device__ inline int announcements(const Item& item) {
  return item.pieces == 2 ? item.mergers : item.pieces;
}

// A unit's counter counts what is announced, and then the mergers that have seen all of that. The
// last of these makes it zero again, for the next launch.
__device__ inline u32* counter_of(const Params& params, const Item& item) {
  return params.counters + item.owner;
}

__device__ inline u32 last_count(const Item& item) {
  return static_cast<u32>(announcements(item) + item.mergers - 1);
}

// When all threads of the crew have written; tells those who wait.
__device__ inline void announce(const Params& params, const Item& item, const Crew& crew) {
  crew.sync();
  if (crew.is_leader()) red_inc_release_gpu(counter_of(params, item), last_count(item));
}

// Waits for all pieces, by each merger once.
__device__ inline void await(const Params& params, const Item& item, const Crew& crew) {
  if (crew.is_leader()) {
    u32* counter = counter_of(params, item);
    while (ld_acquire_gpu(counter) < static_cast<u32>(announcements(item))) {
    }
    red_inc_relaxed_gpu(counter, last_count(item));
  }
  crew.sync();
}

// By the threads of a crew.
__device__ inline void store_partial(const Params& params, SharedMemory& shared, const Crew& crew,
                                     int place, const Accumulators& accumulators,
                                     const OwnRows& rows) {
  float scales[kOwnRows];
  scales_of_rows(shared, crew, accumulators, rows, scales);
  uint2* values = partial_values(params, place) + own_values();
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    values[task_offset(i) * kWarpLanes] =
        to_halves(weighted(accumulator(accumulators, i), scales, i));
  }
  store_states(partial_rows(params, place), crew, rows, scales);
}

// What a crew brings of other pieces, where query and tokens were: no item follows. First some rows
// of every piece, then some tasks.
struct MergeRoom {
  unsigned char* bytes;
  int pieces;
  int first_row;
  int rows;
  int first_task;
  int tasks;

  __device__ PartialRow* states(int piece) const {
    return reinterpret_cast<PartialRow*>(bytes) + piece * rows;
  }
  __device__ PartialRow& state(int piece, int row) const { return states(piece)[row - first_row]; }
  __device__ uint2* values(int piece) const {
    return reinterpret_cast<uint2*>(states(pieces)) + piece * tasks * kWarpLanes;
  }
};

static_assert(kRows * sizeof(PartialRow) + kTasks * kTaskBytes <= kRoomBytes,
              "the only other piece comes whole");
static_assert(kRowsOfGroup * sizeof(PartialRow) % kChunkBytes == 0, "rows are copied in chunks");

// Begins to copy so many bytes, by threads of which each has `step` bytes between its chunks.
__device__ inline void begin_copy(u32 target, const void* source, int bytes, int first, int step) {
  const unsigned char* from = reinterpret_cast<const unsigned char*>(source);
#pragma unroll 1
  for (int i = first; i < bytes; i += step) cp_async_cg_16(target + i, from + i, kChunkBytes);
}

// Copies are waited for once: the latency of what other blocks have just written is long. Many
// pieces are shared among warps, of few each is shared by all threads.
__device__ inline void bring_pieces(const Params& params, const Item& item, const Crew& crew,
                                    const MergeRoom& room, int first_piece) {
  const bool are_many = room.pieces >= kConsumerWarps;
  const int step = (are_many ? kWarpLanes : crew.threads()) * kChunkBytes;
  const int first = (are_many ? fresh_lane() : crew.thread()) * kChunkBytes;
#pragma unroll 1
  for (int piece = are_many ? fresh_warp() : 0; piece < room.pieces;
       piece += are_many ? kConsumerWarps : 1) {
    const int place = place_of_piece(params, item, first_piece + piece);
    begin_copy(shared_address(room.states(piece)), partial_rows(params, place) + room.first_row,
               room.rows * static_cast<int>(sizeof(PartialRow)), first, step);
    begin_copy(shared_address(room.values(piece)),
               partial_values(params, place) + room.first_task * kWarpLanes,
               room.tasks * kTaskBytes, first, step);
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  crew.sync();
}
