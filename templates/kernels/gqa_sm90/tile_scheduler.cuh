// What a block computes one after the other: items, which are pieces of units.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "schedule_range.cuh"
#include "seq_info.cuh"

// Tokens that a row may see: from `begin` to before `end`.
struct Sight {
  int begin;
  int end;

  __device__ bool has(int token) const { return token >= begin && token < end; }
};

struct Item {
  static constexpr int kNone = -1;  // as request: there is no such item

  int first_query;  // index of the request's first query token among all
  int request;
  int kv_head;
  int first_row;  // of the tile, among the request's rows of the kv head
  int rows;  // of the tile; the rest of kRows is padding
  int q_len;
  int kv_len;
  int all_begin, all_end;  // tokens that every row sees
  int any_begin, any_end;  // tokens that some row may see
  int first_tile;  // of tokens
  int tiles;
  int pieces;
  int piece;  // which of them this is
  int first_block;  // of the grid, that has piece 0

  __device__ static Item none() {
    Item item = {};
    item.request = kNone;
    return item;
  }

  __device__ bool is_none() const { return request == kNone; }

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

  __device__ Sight sight_of(const Params& params, int row) const {
    if (row >= rows) return {0, 0};
    const int query = query_of(params, row);
    const int end = params.draft_mask == nullptr ? kv_len - q_len + query + 1 : kv_len;
    return {window_begin(params, kv_len, q_len, query), end};
  }

  // Whether the draft mask, if there is one, shows a row a token.
  __device__ bool is_shown(const Params& params, int row, int token) const {
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return true;
    const u32* words = params.draft_mask +
                       static_cast<i64>(first_query + query_of(params, row)) * params.mask_words;
    // Drafts beyond the mask are shown to no row.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }

  // Whether a row sees a token.
  __device__ bool sees(const Params& params, int row, int token) const {
    return sight_of(params, row).has(token) && is_shown(params, row, token);
  }
};

// The item that a walk is at, of the first of the block's kv heads.
__device__ inline Item item_at(const Params& params, const Span& span, const WalkState& walk) {
  const RequestFacts& facts = walk.facts;
  Item item;
  item.first_query = facts.first_query;
  item.request = walk.request;
  item.q_len = facts.q_len;
  item.kv_len = facts.kv_len;
  const int part = walk.unit * params.cta_group_size + static_cast<int>(span.member);
  const int heads = facts.row_tiles == 1 ? part : part / facts.row_tiles;
  item.kv_head = heads * kHeads;
  item.first_row = (part - heads * facts.row_tiles) * kRows;
  item.rows = min(facts.q_len * params.group_size - item.first_row, kRows);

  const int first = item.query_of(params, 0);
  const int last = item.query_of(params, item.rows - 1);
  const int before = facts.kv_len - facts.q_len;  // tokens before the new ones
  const bool has_mask = params.draft_mask != nullptr;
  item.any_begin = window_begin(params, facts.kv_len, facts.q_len, first);
  item.all_begin = window_begin(params, facts.kv_len, facts.q_len, last);
  item.any_end = max(has_mask ? facts.kv_len : before + last + 1, 0);
  item.all_end = max(has_mask ? before : before + first + 1, 0);

  const u32 length = unit_length(facts);
  const u32 unit_end = walk.unit_begin + length;
  const int begin = static_cast<int>(max(span.begin, walk.unit_begin) - walk.unit_begin);
  const int end = static_cast<int>(min(span.end, unit_end) - walk.unit_begin);
  item.first_tile = max(facts.first_tile + begin, item.any_begin / kTileTokens);
  const int last_tile = min(facts.first_tile + end, ceil_div(item.any_end, kTileTokens));
  item.tiles = max(last_tile - item.first_tile, 0);
  item.pieces = 1;
  item.piece = 0;
  u32 first_span = span.index;
  if (begin > 0 || walk.unit_begin + end < unit_end) {
    first_span = span_at(walk.unit_begin, span);
    item.pieces = static_cast<int>(span_at(unit_end - 1, span) - first_span) + 1;
    item.piece = static_cast<int>(span.index - first_span);
  }
  item.first_block = static_cast<int>(first_span * params.cta_group_size + span.member);
  return item;
}

// Goes to the next unit; says whether it begins on the span.
__device__ inline bool go_on(const Params& params, const Span& span, WalkState& walk) {
  walk.unit_begin += unit_length(walk.facts);
  if (walk.unit_begin >= span.end) return false;
  if (++walk.unit < walk.facts.units) return true;
  walk.unit = 0;
#pragma unroll 1
  do {
    walk.facts = facts_of_request(params, ++walk.request);
  } while (walk.facts.units == 0);
  return true;
}
