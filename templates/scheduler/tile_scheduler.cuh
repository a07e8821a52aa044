// What a block computes one after the other: pieces of units, for one member of the team.

#pragma once

#include "combine/subtile_size.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/mov.cuh"
#include "scheduler/schedule_range.cuh"

// The block of tokens that a position is in, counted from the unit's first; what comes before the
// blocks belongs to the first.
__device__ inline int block_at(int position, int unit_begin, const Span& span) {
  return max(position - unit_begin - span.unit_cost, 0);
}

// How a unit is cut: its pieces lie on the spans from `first_span` on, and the last of those may
// end with it.
struct Pieces {
  int count;
  int first_span;
  bool end_span;
};

// The first span that begins at or after a position: the least whose product with the line's length
// is no less than the position's with the spans. A quotient in floats is one too many or too few at
// the most, and ten times as short as a division of 64 bits.
__device__ inline int span_from(int position, const Span& span) {
  const i64 wanted = static_cast<i64>(position) * span.spans;
  const float share = __fdividef(static_cast<float>(span.spans), static_cast<float>(span.total));
  int index = __float2int_rz(static_cast<float>(position) * share) - 1;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    if (static_cast<i64>(index) * span.total < wanted) ++index;
  }
  return index;
}

__device__ inline Pieces pieces_of(int unit_begin, int blocks, const Span& span) {
  const int first_block = unit_begin + span.unit_cost;
  const int second = span_from(first_block + 1, span);
  const int end = first_block + blocks;
  const int after = span_from(end, span);
  const bool end_span =
      static_cast<u64>(after) * span.total < static_cast<u64>(end + 1) * span.spans;
  return {1 + after - second, second - 1, end_span};
}

// One piece of a unit, for one member of the team, as all its warps need it.
struct Item : Part {
  u32 count;  // of items before
  int visible_to_all;  // tokens that every row of the tile sees
  int pieces;
  int mergers;  // of them, the first: the last is one if nothing follows it in its block
  int slice_tasks;  // where there are more than two pieces
  int piece;
  int owner;  // the block of the grid that has piece 0
  int row_visible[kRows];  // how many tokens a row sees
};

// Goes through the items of a span, by whole warps.
struct ItemWalk : WalkState {
  const Params& params;
  const Span& span;
  int member;

  __device__ ItemWalk(const Params& params, const Span& span, int member, const WalkState& state)
      : WalkState(state), params(params), span(span), member(member) {}

  __device__ void advance() {
    unit_begin += facts.blocks + span.unit_cost;
    if (++group < facts.groups) return;
    group = 0;
#pragma unroll 1
    do {
      if (++request >= params.num_seqs) return;
      facts = facts_of_request(params, request);
    } while (facts.groups == 0);
  }

  // The item that it is at; its request is minus one if it is at none.
  __device__ Part here() const {
    const int first = first_block();
    const int last = last_block();
    const bool is_here = facts.blocks == 0 ? span.begin <= unit_begin : first < last;
    const int first_row = (group * params.cta_group_size + member) * kRows;
    if (!is_here || first_row >= facts.rows) return kNoPart;
    const int rows = min(facts.rows - first_row, kRows);
    const int visible_to_any = visible_tokens(first_row + rows - 1);
    const int seen_blocks = static_cast<u32>(visible_to_any + kBlockTokens - 1) / kBlockTokens;
    const int blocks = max(min(last, seen_blocks) - first, 0);
    return {facts.first_query, request, first_row, rows, first, blocks, visible_to_any};
  }

  // Goes to the next item, or, if it `stays`, to none; its request is minus one if there is none.
  __device__ Part next(bool stays) {
    Part part;
#pragma unroll 1
    do {
      if (!stays) advance();
      stays = false;
      if (request >= params.num_seqs || unit_begin >= span.end) return kNoPart;
      part = here();
    } while (part.request < 0);
    return part;
  }

  // The first item, from the unit on that the span begins in.
  __device__ Part first() {
    u32 stays = 1;
    mov_b32(stays);  // else compilers write the first turn apart
    return next(stays != 0);
  }

  // All of the item that it is at, and that `part` is of.
  __device__ void fill(Item& item, const Part& part, u32 count) const {
    if constexpr (!kIsSparse) {  // of a list all rows see all
#pragma unroll 1
      for (int row = fresh_lane(); row < kRows; row += kWarpLanes) {
        item.row_visible[row] = row < part.rows ? visible_tokens(part.first_row + row) : 0;
      }
    }
    if (fresh_lane() != 0) return;
    static_cast<Part&>(item) = part;
    Pieces pieces = {1, span.index, true};
    if (first_block() > 0 || last_block() < facts.blocks) {
      pieces = pieces_of(unit_begin, facts.blocks, span);
    }
    item.count = count;
    item.visible_to_all = visible_tokens(part.first_row);
    item.pieces = pieces.count;
    item.mergers = pieces.count - (pieces.end_span ? 0 : 1);
    item.slice_tasks = tasks_of_slice(item.mergers);
    item.piece = first_block() == 0 ? 0 : span.index - pieces.first_span;
    item.owner = block_of_span(pieces.first_span);
  }

  // The blocks of the unit that lie on the span.
  __device__ int first_block() const {
    return span.begin > unit_begin ? block_at(span.begin, unit_begin, span) : 0;
  }
  __device__ int last_block() const {
    const int unit_end = unit_begin + facts.blocks + span.unit_cost;
    return span.end < unit_end ? block_at(span.end, unit_begin, span) : facts.blocks;
  }

  // How many tokens a row of the request sees: all up to its own position, or all.
  __device__ int visible_tokens(int row) const {
    if (kIsSparse || !params.is_causal || facts.q_len <= 1) return facts.kv_len;
    const u32 token = static_cast<u32>(row) / static_cast<u32>(params.heads);
    return max(facts.kv_len - (facts.q_len - 1 - static_cast<int>(token)), 0);
  }

  // The block of the grid that has this member's part of a span.
  __device__ int block_of_span(int index) const {
    return (span.spans - 1 - index) * params.cta_group_size + member;
  }
};

// Items are handed on in two places, queries in one; where the item that `count` have preceded is,
// and which phase of a barrier is its own.
__device__ inline u32 item_slot(u32 count) { return count % 2; }
__device__ inline u32 item_parity(u32 count) { return count / 2 % 2; }
__device__ inline u32 query_parity(u32 count) { return count % 2; }
