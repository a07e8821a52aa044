// What a block computes one after the other: pieces of units, for one member of the team. Needs
// span.cuh.

// The block of tokens that a position is in, counted from the unit's first; what comes before the
// blocks belongs to the first.
__device__ inline int block_at(i64 position, i64 unit_begin, const Span& span) {
  return static_cast<int>(max(position - unit_begin - span.unit_cost, static_cast<i64>(0)));
}

// How a unit is cut: its pieces lie on the spans from `first_span` on.
struct Pieces {
  int count;
  int first_span;
};

// The first span that begins at or after a position.
__device__ inline int span_from(i64 position, const Span& span) {
  return static_cast<int>(quotient(position * span.spans + span.total - 1, span.total));
}

__device__ inline Pieces pieces_of(i64 unit_begin, int blocks, const Span& span) {
  const i64 first_block = unit_begin + span.unit_cost;
  const int second = span_from(first_block + 1, span);
  const int after = span_from(first_block + blocks, span);
  return {1 + after - second, second - 1};
}

// One piece of a unit, for one member of the team, as all its warps need it.
struct Item {
  u32 count;  // of items before
  i64 first_query;  // index of the request's first query token among all
  int request;  // minus one after the last item
  int first_row;  // of the tile, among the request's rows
  int rows;  // of the tile; the rest of kRows is padding
  int first_block;
  int blocks;  // of tokens, that this piece computes
  int visible_to_all;  // tokens that every row of the tile sees
  int visible_to_any;  // tokens that some row sees
  int pieces;
  int piece;
  int owner;  // the block of the grid that has piece 0
  int row_visible[kRows];  // how many tokens a row sees
};

// Goes through the items of a span, by one warp. Its state is in shared memory in between: those
// who walk have few registers.
struct ItemWalk {
  const Params& params;
  SpanScratch& scratch;
  const Span& span;
  int member;
  int request;
  int group;
  i64 unit_begin;
  RequestFacts facts;

  __device__ ItemWalk(const Params& params, SpanScratch& scratch, int member)
      : params(params),
        scratch(scratch),
        span(scratch.span),
        member(member),
        request(scratch.request),
        group(scratch.group),
        unit_begin(scratch.unit_begin),
        facts(scratch.facts) {}

  __device__ void remember() const {
    __syncwarp();
    if (lane_index() != 0) return;
    scratch.request = request;
    scratch.group = group;
    scratch.unit_begin = unit_begin;
    scratch.facts = facts;
  }

  __device__ void advance() {
    unit_begin += facts.blocks + span.unit_cost;
    if (++group < facts.groups) return;
    group = 0;
    do {
      if (++request >= params.requests) return;
      facts = facts_of_request(params, request);
    } while (facts.groups == 0);
  }

  // Fills `item` with the next one; its request is minus one if there is none.
  __device__ void next(Item& item) {
    for (; request < params.requests && unit_begin < span.end; advance()) {
      const int blocks = facts.blocks;
      const i64 unit_end = unit_begin + blocks + span.unit_cost;
      const int first = span.begin > unit_begin ? block_at(span.begin, unit_begin, span) : 0;
      const int last = span.end < unit_end ? block_at(span.end, unit_begin, span) : blocks;
      const bool is_here = blocks == 0 ? span.begin <= unit_begin : first < last;
      const int tile = group * params.team_size + member;
      const int first_row = tile * kRows;
      if (!is_here || first_row >= facts.rows) continue;
      fill(item, first_row, first, last);
      advance();
      remember();
      return;
    }
    if (lane_index() == 0) item.request = -1;
  }

  __device__ void fill(Item& item, int first_row, int first_block, int last_block) const {
    const int rows = min(facts.rows - first_row, kRows);
    for (int row = lane_index(); row < kRows; row += kWarpLanes) {
      item.row_visible[row] = visible_tokens(first_row + row, row < rows);
    }
    if (lane_index() != 0) return;
    Pieces pieces = {1, span.index};
    if (first_block > 0 || last_block < facts.blocks) {
      pieces = pieces_of(unit_begin, facts.blocks, span);
    }
    const int visible_to_any = visible_tokens(first_row + rows - 1, true);
    const int seen_blocks = ceil_div(visible_to_any, kBlockTokens);
    item.first_query = facts.first_query;
    item.request = request;
    item.first_row = first_row;
    item.rows = rows;
    item.first_block = first_block;
    item.blocks = max(min(last_block, seen_blocks) - first_block, 0);
    item.visible_to_all = visible_tokens(first_row, true);
    item.visible_to_any = visible_to_any;
    item.pieces = pieces.count;
    item.piece = first_block == 0 ? 0 : span.index - pieces.first_span;
    item.owner = block_of_span(pieces.first_span);
  }

  // How many tokens a row of the request sees: all up to its own position, or all.
  __device__ int visible_tokens(int row, bool is_row) const {
    const bool is_prefix = params.is_causal && facts.q_len > 1;
    const int later = is_prefix ? facts.q_len - 1 - row / params.heads : 0;
    return is_row ? max(facts.kv_len - later, 0) : 0;
  }

  // The block of the grid that has this member's part of a span.
  __device__ int block_of_span(int index) const {
    return (span.spans - 1 - index) * params.team_size + member;
  }
};

// Items are handed on in two places, queries in one; where the item that `count` have preceded is,
// and which phase of a barrier is its own.
__device__ inline u32 item_slot(u32 count) { return count % 2; }
__device__ inline u32 item_parity(u32 count) { return count / 2 % 2; }
__device__ inline u32 query_parity(u32 count) { return count % 2; }
