// The pieces of a unit: how they are left in the workspace, brought from there, and two of them
// added.

#pragma once

#include "accumulators.cuh"
#include "combine/partial_state.cuh"
#include "combine/reduce_group.cuh"
#include "combine/subtile_size.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld.cuh"
#include "ptx/red.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "store_partial_state.cuh"

// A task is one float4 of every thread of a warp. A piece is left in the workspace task by task, as
// four halves a thread, for what is written and read is what merging costs; and each row's state.
// Each block of the grid has two places: for the piece that its span begins with, and for the one
// it ends with.
constexpr int kTaskBytes = kWarpLanes * sizeof(uint2);

__device__ inline int first_place(int block) { return block * 2; }
__device__ inline int last_place(int block) { return block * 2 + 1; }

// Where this block leaves its piece.
__device__ inline int place_of_own(const Item& item) {
  const int block = static_cast<int>(blockIdx.x);
  return item.piece > 0 ? first_place(block) : last_place(block);
}

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

// Where the pieces of a unit lie. Spans are in the opposite order of blocks.
struct PiecePlaces {
  int owner;
  int team_size;

  __device__ PiecePlaces(const Params& params, const Item& item)
      : owner(item.owner), team_size(params.cta_group_size) {}

  __device__ int operator[](int piece) const {
    return piece == 0 ? last_place(owner) : first_place(owner - piece * team_size);
  }
};

// How many crews leave a piece, or one half of it, for others: of two pieces each merger's half
// comes from the other block.
__device__ inline int announcements(const Item& item) {
  return item.pieces == 2 ? item.mergers : item.pieces;
}

// A unit's counter counts what is announced, and then the mergers that have seen all of that. The
// last of these makes it zero again, for the next launch.
__device__ inline u32* counter_of(const Params& params, const Item& item) {
  return params.semaphores + item.owner;
}

__device__ inline u32 last_count(const Item& item) {
  return static_cast<u32>(announcements(item) + item.mergers - 1);
}

// When all threads of the crew have written; tells those who wait.
__device__ inline void announce(const Params& params, const Item& item, const Crew& crew) {
  u32* counter = counter_of(params, item);
  const u32 last = last_count(item);
  crew.sync();
  if (crew.is_leader()) red_inc_release_gpu(counter, last);
}

// Waits for all pieces, by each merger once.
__device__ inline void await(const Params& params, const Item& item, const Crew& crew) {
  if (crew.is_leader()) {
    u32* counter = counter_of(params, item);
    const u32 last = last_count(item);
    const u32 awaited = static_cast<u32>(announcements(item));
    while (ld_acquire_gpu(counter) < awaited) {
    }
    red_inc_relaxed_gpu(counter, last);
  }
  crew.sync();
}

// What a crew has of pieces to merge, where query and tokens were: no item follows. First some
// rows, each of every piece, then of every piece some tasks.
struct MergeRoom {
  unsigned char* bytes;
  int pieces;
  int first_row;  // behind the last row comes the first again
  int rows;
  int first_task;
  int tasks;

  // Whether the values of the block's own piece are where they will be merged.
  __device__ bool keeps_own() const { return tasks >= kTasksTogether; }

  // A row of those from the first on, and where a row is among them.
  __device__ int row_at(u32 place) const { return static_cast<int>((first_row + place) % kRows); }
  __device__ u32 place_of(int row) const { return static_cast<u32>(row - first_row) % kRows; }

  __device__ PartialRow* states(u32 place) const {
    // An odd number of chunks, so that rows begin in different banks.
    return reinterpret_cast<PartialRow*>(bytes) + place * (pieces | 1);
  }
  __device__ PartialRow& state(int piece, int row) const { return states(place_of(row))[piece]; }
  __device__ uint2* values(int piece) const {
    return reinterpret_cast<uint2*>(states(rows)) + piece * tasks * kWarpLanes;
  }
};

static_assert(kRows * sizeof(PartialRow) + kTasks * kTaskBytes <= kRoomBytes,
              "the only other piece comes whole");

// Where a thread leaves the values of a piece: in the workspace, but for the tasks that this block
// will merge itself. These stay in its room, if they are whole groups of four.
struct PieceTarget {
  uint2* left;
  uint2* kept;
  int first_kept;
  int kept_tasks;

  // `room` is for a slice, which may be empty.
  __device__ PieceTarget(const Params& params, const Item& item, const MergeRoom& room)
      : left(partial_values(params, place_of_own(item)) + own_values()),
        kept(room.values(item.piece) + own_values() - room.first_task * kWarpLanes),
        first_kept(room.first_task - first_task_of(fresh_warp())),
        kept_tasks(room.keeps_own() ? room.tasks : 0) {}

  // Of float4 `i`.
  __device__ uint2* place(int i) const {
    const int group = task_offset(i) / kTasksTogether * kTasksTogether;
    const bool keeps = static_cast<u32>(group - first_kept) < static_cast<u32>(kept_tasks);
    return (keeps ? kept : left) + task_offset(i) * kWarpLanes;
  }
};

// By the threads of a crew.
__device__ inline void store_partial(const Params& params, const Item& item, SharedMemory& shared,
                                     const Crew& crew, const PieceTarget& target,
                                     const Accumulators& accumulators, const OwnRows& rows) {
  float scales[kOwnRows];
  scales_of_rows(shared, crew, accumulators, rows, scales);
#pragma unroll
  for (int task = 0; task < kAccumulators; ++task) {
    const int i = accumulator_in_order(task);
    *target.place(i) = to_halves(weighted(accumulator(accumulators, i), scales, i));
  }
  store_states(partial_rows(params, place_of_own(item)), crew, rows, scales);
}

// Begins to copy the tasks of all pieces but `own`, from `first_piece` on: of many pieces each by
// one warp, of few each by all. A warp copies some chunks of its lanes together.
__device__ inline void begin_values(const Params& params, const PiecePlaces& places,
                                    const Crew& crew, const MergeRoom& room, int first_piece,
                                    int own) {
  constexpr int kChunksTogether = 4;
  constexpr int kCopyBytes = kWarpLanes * kChunkBytes;
  const int warp = crew.thread() / kWarpLanes;
  const int warps = crew.threads() / kWarpLanes;
  const bool are_many = room.pieces >= kConsumerWarps;
  const int step = kChunksTogether * kCopyBytes * (are_many ? 1 : warps);
  const int first =
      kChunksTogether * kCopyBytes * (are_many ? 0 : warp) + fresh_lane() * kChunkBytes;
  const int bytes = room.tasks * kTaskBytes;
#pragma unroll 1
  for (int piece = are_many ? warp : 0; piece < room.pieces; piece += are_many ? warps : 1) {
    if (first_piece + piece == own) continue;
    const unsigned char* source = reinterpret_cast<const unsigned char*>(
        partial_values(params, places[first_piece + piece]) + room.first_task * kWarpLanes);
    const u32 target = shared_address(room.values(piece));
#pragma unroll 1
    for (int i = first; i < bytes; i += step) {
#pragma unroll
      for (int chunk = 0; chunk < kChunksTogether; ++chunk) {
        if (i + chunk * kCopyBytes >= bytes) continue;
        cp_async_cg_16(target + i + chunk * kCopyBytes, source + i + chunk * kCopyBytes,
                       kChunkBytes);
      }
    }
  }
}
