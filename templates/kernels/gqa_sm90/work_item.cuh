// Work item of a CTA: one split of a work tile, and the tokens that its rows attend to.

#pragma once

#include "common/dcp.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"

// Tokens: [begin, end).
struct KvRange {
  int begin;
  int end;

  __device__ bool contains(int token) const { return token >= begin && token < end; }
};

// Rows of a work tile: [begin, end).
struct RowRange {
  int begin;
  int end;

  __device__ bool contains(int row) const { return row >= begin && row < end; }
};

struct WorkItem : WorkCoord {
  int kv_head;
  int q_len;
  int kv_len;
  int unmasked_kv_begin, unmasked_kv_end;  // tokens that every row attends to
  int kv_begin;  // of the tokens that any row may attend to
  int num_splits;  // of the work tile
  int split_idx;
  int first_split;  // CTA of split 0; of a fixed split, linear index of split 0 in the schedule

  __device__ static WorkItem none() {
    WorkItem work = {};
    static_cast<WorkCoord&>(work) = kInvalidWork;
    return work;
  }

  __device__ bool is_none() const { return seq_idx < 0; }

  // Page ids of the sequence: a row of a block table, or a part of the flat page ids of a plan.
  // Called for an item that is none, too, which must not read before the offsets.
  __device__ const int* page_ids(const Params& params) const {
    const i64 start = params.kv_indptr == nullptr
                          ? seq_idx * static_cast<i64>(params.block_tables_stride)
                          : params.kv_indptr[max(seq_idx, 0)];
    return params.block_tables + start;
  }

  // The same of its values.
  __device__ const int* value_page_ids(const Params& params) const {
    if constexpr (kSeparatePageIds) {
      return value_tables_of(params) + seq_idx * static_cast<i64>(params.block_tables_stride);
    } else {
      return page_ids(params);
    }
  }

  __device__ int query_of(const Params& params, int row) const {
    return kIsSparse || q_len == 1 ? 0 : (first_row + row) / params.group_size;
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

  // Rows that may attend to a token, by causality and window. A token takes a product where a row
  // would take a division.
  __device__ RowRange rows_of(const Params& params, int token) const {
    if (token >= kv_len) return {0, 0};
    if constexpr (kHasDcp) {
      const i64 first_query = min(dcp_first_query(params, seq_idx, token), static_cast<i64>(q_len));
      return {static_cast<int>(first_query) * params.group_size - first_row, rows};
    }
    const int draft = token - (kv_len - q_len);
    const bool is_causal = params.draft_mask == nullptr && params.is_causal;
    const int first = is_causal ? max(draft, 0) : 0;
    const int end = draft < q_len - params.window ? max(draft + params.window, 0) : q_len;
    return {first * params.group_size - first_row, min(end * params.group_size - first_row, rows)};
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
    return rows_of(params, token).contains(row) && draft_mask_allows(params, row, token);
  }
};

// Current work item of a CTA: all of a work tile that lies in its range, or a fixed split of that.
struct WorkState : SchedulerState {
  int split;  // relative to the tile; of batch-invariant kernels

  __device__ bool advance(const Params& params, const ScheduleRange& range) {
    if constexpr (kBatchInvariant) {
      if (++split < end_kv_block(range)) return true;
      split = 0;
    }
    return SchedulerState::advance(params, range);
  }
};

// Work item of the current state, for the first kv head of the CTA.
__device__ inline WorkItem work_at(const Params& params, const ScheduleRange& range,
                                   int rank_in_group, const WorkState& state) {
  const SeqInfo& seq_info = state.seq_info;
  WorkItem work;
  work.first_query = seq_info.first_query;
  work.seq_idx = state.seq_idx;
  work.q_len = seq_info.q_len;
  work.kv_len = seq_info.kv_len;
  const int head_tile = state.tile * params.cta_group_size + rank_in_group;
  const int head_group = seq_info.m_tiles == 1 ? head_tile : head_tile / seq_info.m_tiles;
  work.kv_head = head_group * kKvHeadsPerCta;
  work.first_row = (head_tile - head_group * seq_info.m_tiles) * kBlockM;
  work.rows = min(seq_info.q_len * params.group_size - work.first_row, kBlockM);

  const int first = work.query_of(params, 0);
  const int last = work.query_of(params, work.rows - 1);
  const int context_len = seq_info.kv_len - seq_info.q_len;
  const bool has_mask = params.draft_mask != nullptr;
  const bool is_causal = !has_mask && params.is_causal;
  work.kv_begin = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, first);
  work.unmasked_kv_begin = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, last);
  work.kv_end = max(is_causal ? context_len + last + 1 : seq_info.kv_len, 0);
  const int first_row_end = is_causal ? context_len + first + 1 : seq_info.kv_len;
  work.unmasked_kv_end = max(has_mask ? context_len : first_row_end, 0);
  if constexpr (kHasDcp) {
    work.kv_end = dcp_kv_end_of_query(params, work.seq_idx, last, work.kv_len);
    work.unmasked_kv_end = dcp_kv_end_of_query(params, work.seq_idx, first, work.kv_len);
  }

  int begin = seq_info.first_kv_block + state.first_kv_block(range);
  int end = seq_info.first_kv_block + state.end_kv_block(range);
  if (kTailTokens > 0 && end == seq_info.num_kv_blocks) end = ceil_div(work.kv_end, kBlockN);
  if constexpr (kBatchInvariant) {
    begin = seq_info.first_kv_block + fixed_split_begin(seq_info, state.split);
    end = seq_info.first_kv_block + fixed_split_begin(seq_info, state.split + 1);
  }
  work.first_kv_block = max(begin, work.kv_begin / kBlockN);
  const int end_kv_block = min(end, ceil_div(work.kv_end, kBlockN));
  work.num_kv_blocks = max(end_kv_block - work.first_kv_block, 0);
  if constexpr (kBatchInvariant) {
    work.num_splits = tile_kv_blocks(seq_info, 0);
    work.split_idx = state.split;
    work.first_split = state.tile_begin;
  } else {
    const Splits splits = state.splits(range);
    work.num_splits = splits.num_splits;
    work.split_idx = range.index - splits.first_range;
    work.first_split = splits.first_range * params.cta_group_size + rank_in_group;
  }
  return work;
}
