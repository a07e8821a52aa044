// Has the first page ids, or listed tokens, of a span brought into L2: loaders wait for them.

#pragma once

#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/prefetch.cuh"
#include "scheduler/schedule_range.cuh"

constexpr int kIdsOfLine = 128 / sizeof(int);
constexpr int kTokensOfId = kIsSparse ? 1 : kPageSize;
constexpr int kFirstLines = 4;  // as many as two blocks have of listed tokens

// By a warp, where a span has been found.
__device__ inline void prefetch_ids(const Params& params, const SpanScratch& scratch) {
  const int line = lane_index();
  if (line >= kFirstLines) return;
  const TableRow row = table_row(params, scratch.first.request);
  const int block = scratch.span.begin - scratch.first.unit_begin - scratch.span.unit_cost;
  // A span may begin in a later request; what is behind the row's end is nobody's.
  const u32 token = static_cast<u32>(max(block, 0)) * kBlockTokens;
  const u32 index = token / kTokensOfId + line * kIdsOfLine;
  if (index < static_cast<u32>(row.pages)) prefetch_l2(params.block_tables + row.start + index);
}
