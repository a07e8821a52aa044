// Where every block begins.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/prefetch_block_table.cuh"
#include "scheduler/sched_meta_cache.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"

// By all threads: brings the walk to the block's first item, and returns that.
__device__ inline Part begin_walk(const Params& params, int team, int length, SpanScratch& scratch,
                                  ItemWalk& walk) {
  const bool is_kept = __any_sync(~0u, recall_beginning(params, length, scratch));
  bool has_span = is_kept && scratch.part.request >= 0;
  if (!is_kept) has_span = find_span(params, team, length, scratch);
  has_span = __any_sync(~0u, has_span);
  if (has_span && warp_index() == kConsumerWarps - 1) prefetch_ids(params, scratch);
  static_cast<WalkState&>(walk) = scratch.first;
  Part first = scratch.part;
  if (!is_kept) {
    first = has_span ? walk.first() : kNoPart;
    keep_beginning(params, {scratch.span, walk, first});
  }
  return first;
}
