// Has the first page ids, or listed tokens, of a span brought into L2: loaders wait for them.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/prefetch.cuh"
#include "scheduler/schedule_range.cuh"

constexpr int kIdsPerCacheLine = 128 / sizeof(int);
constexpr int kTokensPerId = kIsSparse ? 1 : kPageSize;
constexpr int kPrefetchLines = 4;  // as many as two blocks have of listed tokens

// By a warp, where a span has been found.
__device__ inline void prefetch_block_table(const Params& params,
                                            const SchedulerStorage& scheduler_storage) {
  const int cache_line = lane_index();
  if (cache_line >= kPrefetchLines) return;
  const BlockTableRow row = block_table_row(params, scheduler_storage.initial_state.seq_idx);
  const int kv_block = scheduler_storage.range.begin - scheduler_storage.initial_state.tile_begin -
                       scheduler_storage.range.fixed_overhead_blocks;
  // A span may begin in a later request; what is behind the row's end is nobody's.
  const u32 token = static_cast<u32>(max(kv_block, 0)) * kBlockN;
  const u32 index = token / kTokensPerId + cache_line * kIdsPerCacheLine;
  if (index < static_cast<u32>(row.num_pages)) prefetch_l2(params.block_tables + row.start + index);
}
