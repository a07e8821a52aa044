// Leaves what consumers have of an item where it belongs: in the output, or in the workspace to
// be merged.

#pragma once

#include "accumulators.cuh"
#include "combine/combine_pair.cuh"
#include "combine/combine_subtiles.cuh"
#include "combine/partial_out.cuh"
#include "combine/reduce_group.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "nonfinite_flag.cuh"
#include "output_dims.cuh"
#include "ptx/barrier.cuh"
#include "ptx/exit.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/restore_nonfinite.cuh"
#include "softmax/row_state.cuh"
#include "store_rows.cuh"

__device__ inline void store_piece(const Params& params, const Item& item, SharedMemory& shared,
                                   const Crew& crew, const MergeRoom& room,
                                   const Accumulators& accumulators, const OwnRows& rows) {
  const PieceTarget target(params, item, room);
  store_partial(params, item, shared, crew, target, accumulators, rows);
  if (!nonfinite_flag(shared, item)) return;
  restore_nonfinite<Fp16>(params, item, 1.0f, [&](int i, int c) {
    return reinterpret_cast<u16*>(target.place(i)) + c;
  });
}

__device__ inline void store_whole(const Params& params, const Item& item, SharedMemory& shared,
                                   const Accumulators& accumulators, const OwnRows& rows) {
  store_rows(params, item, shared, accumulators, rows);
  if (!nonfinite_flag(shared, item)) return;
  restore_nonfinite<Element>(params, item, output_scale(params), [&](int i, int c) {
    const int warp = fresh_warp();
    return params.out + global_row(params, item, part_row(warp, i, c)) * kHeadDimVo +
           part_dim(warp, i, c);
  });
}

// Two pieces of which neither is followed by anything in its block are merged by both: either keeps
// one half of the tasks and leaves the other. Of other two the owner keeps its own, and of more
// everything is left, but for the slice that the block will merge.
__device__ inline void store_item(const Params& params, const Item& item, SharedMemory& shared,
                                  Accumulators& accumulators, OwnRows& rows) {
  const bool are_exchanged = item.pieces == 2 && item.mergers == 2;
  const int half = half_of_warp(fresh_warp());
  const Crew crew = {are_exchanged ? half : -1};
  const bool keeps = are_exchanged ? half == item.piece : item.piece == 0 && item.pieces <= 2;
  if (keeps) {
    if (item.pieces > 1) fold_piece(params, item, shared, crew, accumulators, rows);
    store_whole(params, item, shared, accumulators, rows);
  } else {
    const MergeRoom room = room_of_slice(shared, item);
    store_piece(params, item, shared, crew, room, accumulators, rows);
    announce(params, item, crew);
    if (item.pieces > 2 && item.piece < item.mergers) {
      merge_slices(params, item, shared, room);
      exit_if(item.pieces);  // nothing follows in this block
    }
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (fresh_thread() == 0) nonfinite_flag(shared, item) = 0;
}
