// Adding the only other piece of a unit to one that is in registers.

#pragma once

#include "accumulate_partial.cuh"
#include "accumulators.cuh"
#include "combine/partial_out.cuh"
#include "combine/reduce_group.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// Adds the only other piece to this one, which is in registers: by the owner, or by both to the
// half that either keeps.
__device__ inline void fold_piece(const Params& params, const Item& item, SharedMemory& shared,
                                  const Crew& crew, Accumulators& accumulators, OwnRows& rows) {
  await(params, item, crew);
  const int tasks = crew.half < 0 ? kTasks : kTasks / 2;
  const MergeRoom room = {shared.query, 1, 0, kRows, max(crew.half, 0) * tasks, tasks};
  const PiecePlaces places(params, item);
  const int row = crew.thread();
  if (row < kRows) {
    cp_async_cg_16(shared_address(&room.state(0, row)),
                   partial_rows(params, places[1 - item.piece]) + row, kChunkBytes);
  }
  begin_values(params, places, crew, room, 1 - item.piece, item.piece);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  crew.sync();
  add_piece(crew, room, accumulators, rows);
}
