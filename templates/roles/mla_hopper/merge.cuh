// Merging the pieces of a unit. Needs SharedMemory, Item, row_state.cuh, blocks/fresh_thread.cuh,
// ptx/atom.cuh, ptx/barrier.cuh, ptx/cp_async.cuh, ptx/cvt.cuh, ptx/ex2.cuh, ptx/ld.cuh; and from
// the consumers Accumulators, with the rows each belongs to, and largest_of_rows.

// A piece is left in the workspace as it is in registers: float4 i of thread t at i *
// kConsumerThreads + t, as four halves, for what is written and read is what merging costs; and
// each row's state. Each block of the grid has two places: for the piece that its span begins with,
// and for the one it ends with.
constexpr int kFewPieces = 2;  // so many are merged by the owner, more by all

__device__ inline int first_place(int block) { return block * 2; }
__device__ inline int last_place(int block) { return block * 2 + 1; }

struct PartialRow {
  float reference;  // log2 units
  float sum;
  float scale;  // what halves are multiplied by; later also by the piece's weight
};

__device__ inline uint2* partial_values(const Params& params, int place) {
  return reinterpret_cast<uint2*>(params.partial_out) +
         static_cast<u32>(place * kAccumulators * kConsumerThreads);
}

__device__ inline PartialRow* partial_rows(const Params& params, int place) {
  return reinterpret_cast<PartialRow*>(params.partial_rows) + place * kRows;
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

// The power of two that brings what is finite of a row, `largest` at the most, below 2^14: the
// eleven bits of a half then tell more of a value than the output will. Both it and its inverse are
// normal numbers.
__device__ inline float half_scale(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + 13 - max(exponent, -100)) << 23);
}

__device__ inline float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

__device__ inline void store_partial(const Params& params, SharedMemory& shared, int place,
                                     const Accumulators& accumulators,
                                     const RowState (&rows)[kOwnRows]) {
  float scales[kOwnRows];
  largest_of_rows(shared, accumulators, scales);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) scales[r] = half_scale(scales[r]);
  uint2* values = partial_values(params, place) + fresh_thread();
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    values[i * kConsumerThreads] = to_halves(weighted(accumulator(accumulators, i), scales, i));
  }
  PartialRow* target = partial_rows(params, place);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    if (!is_row_writer()) continue;
    target[own_row(r)] = {rows[r].reference, rows[r].sum, inverse_of_power(scales[r])};
  }
}

// A task is one float4 of every thread of a warp, over all pieces; a slice is as many tasks as make
// all blocks equally busy.
constexpr int kTasks = kAccumulators * kConsumerWarps;
constexpr int kTaskBytes = kWarpLanes * sizeof(uint2);
constexpr int kRowsBytes = kRows * sizeof(PartialRow);  // of a piece

// What a block brings of other pieces, where query and tokens were: no item follows. First the rows
// of every piece, then as many of its tasks as there is room for.
struct MergeRoom {
  unsigned char* bytes;
  int pieces;
  int tasks;

  __device__ PartialRow* rows(int piece) const {
    return reinterpret_cast<PartialRow*>(bytes) + piece * kRows;
  }
  __device__ uint2* values(int piece) const {
    return reinterpret_cast<uint2*>(bytes + pieces * kRowsBytes) + piece * tasks * kWarpLanes;
  }
};

constexpr int kRoomBytes = sizeof(SharedMemory::query) + sizeof(SharedMemory::tokens);

// How many tasks there is room for at a time.
__device__ constexpr int tasks_at_once(int pieces) {
  return (kRoomBytes / pieces - kRowsBytes) / kTaskBytes;
}
static_assert((kRoomBytes - kRowsBytes) / kTaskBytes >= kTasks, "the only other piece comes whole");
static_assert((kRoomBytes / kMostSpans - kRowsBytes) / kTaskBytes >= 1, "some of each piece comes");

// Copies are waited for once: the latency of what other blocks have just written is long. `round`
// counts what has been brought before; the first time rows come, too. Many pieces are shared among
// warps, of few each is shared by all threads.
__device__ inline void bring_pieces(const Params& params, const Item& item, SharedMemory& shared,
                                    const MergeRoom& room, int first_piece, int first_task,
                                    int round) {
  const bool are_many = room.pieces >= kConsumerWarps;
  const int step = are_many ? kConsumerWarps : 1;
  const int sharers = are_many ? kWarpLanes : kConsumerThreads;
  const int sharer = are_many ? fresh_lane() : fresh_thread();
  const int row_chunks = round == 0 ? kRowsBytes / kChunkBytes : 0;
  const int chunks = row_chunks + room.tasks * kTaskBytes / kChunkBytes;
#pragma unroll 2
  for (int piece = are_many ? fresh_warp() : 0; piece < room.pieces; piece += step) {
    const int place = place_of_piece(params, item, first_piece + piece);
    const Chunk* rows = reinterpret_cast<const Chunk*>(partial_rows(params, place));
    const Chunk* values =
        reinterpret_cast<const Chunk*>(partial_values(params, place) + first_task * kWarpLanes);
    const u32 rows_target = shared_address(room.rows(piece));
    const u32 values_target = shared_address(room.values(piece));
#pragma unroll 2
    for (int i = sharer; i < chunks; i += sharers) {
      const int value = i - row_chunks;
      cp_async_cg_16(
          value < 0 ? rows_target + i * kChunkBytes : values_target + value * kChunkBytes,
          value < 0 ? rows + i : values + value, kChunkBytes);
    }
  }
  cp_async_commit_group();
  cp_async_wait_group<0>();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
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
    const PartialRow other = room.rows(0)[own_row(r)];
    const float largest = fmaxf(rows[r].reference, other.reference);
    own_weights[r] = ex2_approx(rows[r].reference - largest);
    const float weight = ex2_approx(other.reference - largest);
    rows[r] = {largest, rows[r].sum * own_weights[r] + other.sum * weight};
    weights[r] = weight * other.scale;
  }
  const uint2* values = room.values(0) + fresh_thread();
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const float4 own = weighted(accumulator(accumulators, i), own_weights, i);
    const float4 other = weighted(from_halves(values[i * kConsumerThreads]), weights, i);
    set_accumulator(
        accumulators, i,
        make_float4(own.x + other.x, own.y + other.y, own.z + other.z, own.w + other.w));
    if (i % 4 == 3) __syncwarp();  // there are no registers for more at a time
  }
}
