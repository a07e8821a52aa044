// Stream-K tile scheduler: the sequence of work items of a CTA. A work item is one split of a work
// tile.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "schedule_range.cuh"
#include "seq_info.cuh"

// Tokens that a row may attend to: [begin, end).
struct KvRange {
  int begin;
  int end;

  __device__ bool contains(int token) const { return token >= begin && token < end; }
};

struct WorkItem {
  static constexpr int kNone = -1;  // seq_idx behind the last item

  int first_query;  // index of the sequence's first query token among all
  int seq_idx;
  int kv_head;
  int first_row;  // of the tile, among the sequence's rows of the kv head
  int rows;  // of the tile; the rest of kBlockM is padding
  int q_len;
  int kv_len;
  int unmasked_kv_begin, unmasked_kv_end;  // tokens that every row attends to
  int kv_begin, kv_end;  // tokens that any row may attend to
  int first_kv_block;
  int num_kv_blocks;
  int num_splits;  // of the work tile
  int split_idx;
  int first_split_cta;  // CTA of split 0

  __device__ static WorkItem none() {
    WorkItem work = {};
    work.seq_idx = kNone;
    return work;
  }

  __device__ bool is_none() const { return seq_idx == kNone; }

  __device__ int query_of(const Params& params, int row) const {
    return q_len == 1 ? 0 : (first_row + row) / params.group_size;
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group_size + first_row + row -
           query_of(params, row) * params.group_size;
  }

  // Index of a row in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group_size * params.kv_heads + head_of(params, row);
  }

  __device__ KvRange kv_range_of(const Params& params, int row) const {
    if (row >= rows) return {0, 0};
    const int query = query_of(params, row);
    const int end = params.draft_mask == nullptr ? kv_len - q_len + query + 1 : kv_len;
    return {window_kv_begin(params, kv_len, q_len, query), end};
  }

  // Whether the draft mask (tree mask of speculative tokens), if any, lets a row attend to a token.
  __device__ bool draft_mask_allows(const Params& params, int row, int token) const {
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return true;
    const u32* words = params.draft_mask +
                       static_cast<i64>(first_query + query_of(params, row)) * params.mask_words;
    // No row attends to speculative tokens beyond the mask.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }

  // Whether a row attends to a token.
  __device__ bool attends(const Params& params, int row, int token) const {
    return kv_range_of(params, row).contains(token) && draft_mask_allows(params, row, token);
  }
};

// Work item of the current work tile, for the first kv head of the CTA.
__device__ inline WorkItem work_at(const Params& params, const ScheduleRange& range,
                                   const SchedulerState& state) {
  const SeqInfo& seq_info = state.seq_info;
  WorkItem work;
  work.first_query = seq_info.first_query;
  work.seq_idx = state.seq_idx;
  work.q_len = seq_info.q_len;
  work.kv_len = seq_info.kv_len;
  const int head_tile = state.tile * params.cta_group_size + static_cast<int>(range.rank_in_group);
  const int head_group = seq_info.row_tiles == 1 ? head_tile : head_tile / seq_info.row_tiles;
  work.kv_head = head_group * kHeadsPerCta;
  work.first_row = (head_tile - head_group * seq_info.row_tiles) * kBlockM;
  work.rows = min(seq_info.q_len * params.group_size - work.first_row, kBlockM);

  const int first = work.query_of(params, 0);
  const int last = work.query_of(params, work.rows - 1);
  const int first_new_token = seq_info.kv_len - seq_info.q_len;
  const bool has_mask = params.draft_mask != nullptr;
  work.kv_begin = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, first);
  work.unmasked_kv_begin = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, last);
  work.kv_end = max(has_mask ? seq_info.kv_len : first_new_token + last + 1, 0);
  work.unmasked_kv_end = max(has_mask ? first_new_token : first_new_token + first + 1, 0);

  const u32 blocks = tile_kv_blocks(seq_info);
  const u32 tile_end = state.tile_begin + blocks;
  const int begin = static_cast<int>(max(range.begin, state.tile_begin) - state.tile_begin);
  const int end = static_cast<int>(min(range.end, tile_end) - state.tile_begin);
  work.first_kv_block = max(seq_info.first_kv_block + begin, work.kv_begin / kBlockN);
  const int end_kv_block = min(seq_info.first_kv_block + end, ceil_div(work.kv_end, kBlockN));
  work.num_kv_blocks = max(end_kv_block - work.first_kv_block, 0);
  work.num_splits = 1;
  work.split_idx = 0;
  u32 first_range = range.index;
  if (begin > 0 || state.tile_begin + end < tile_end) {
    first_range = range_of(state.tile_begin, range);
    work.num_splits = static_cast<int>(range_of(tile_end - 1, range) - first_range) + 1;
    work.split_idx = static_cast<int>(range.index - first_range);
  }
  work.first_split_cta =
      static_cast<int>(first_range * params.cta_group_size + range.rank_in_group);
  return work;
}

// Advances to the next work tile; returns whether it begins within the range.
__device__ inline bool next_work(const Params& params, const ScheduleRange& range,
                                 SchedulerState& state) {
  state.tile_begin += tile_kv_blocks(state.seq_info);
  if (state.tile_begin >= range.end) return false;
  if (++state.tile < state.seq_info.num_tiles) return true;
  state.tile = 0;
#pragma unroll 1
  do {
    state.seq_info = seq_info_of(params, ++state.seq_idx);
  } while (state.seq_info.num_tiles == 0);
  return true;
}
