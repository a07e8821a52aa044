// Block-table prefetch: the first block-table entries (or top-k indices) of the CTA's range, into
// L2. The first KV load of the producer depends on them.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/prefetch.cuh"
#include "scheduler/schedule_range.cuh"

constexpr int kIdsPerCacheLine = 128 / sizeof(int);
constexpr int kTokensPerId = kIsSparse ? 1 : kPageSize;
constexpr int kPrefetchLines = 4;  // the top-k indices of two KV blocks

// Called by one warp, if the CTA has a range.
__device__ inline void prefetch_block_table(const Params& params,
                                            const SchedulerStorage& scheduler_storage) {
  const int cache_line = lane_index();
  if (cache_line >= kPrefetchLines) return;
  const BlockTableRow row = block_table_row(params, scheduler_storage.initial_state.seq_idx);
  const int kv_block = scheduler_storage.range.begin - scheduler_storage.initial_state.tile_begin -
                       scheduler_storage.range.fixed_overhead_blocks;
  // The range may begin in a later sequence: never prefetches past the end of the row.
  const u32 token = static_cast<u32>(max(kv_block, 0)) * kBlockN;
  const u32 index = token / kTokensPerId + cache_line * kIdsPerCacheLine;
  if (index < static_cast<u32>(row.num_pages)) prefetch_l2(params.block_tables + row.start + index);
}
