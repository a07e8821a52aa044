// How the calls' work is divided among the blocks of the grid, found by each block for itself.
// Needs Params, blocks/table_row.cuh, roles/mla_hopper/constants.

// The tiles of rows of a request are taken in groups, one tile for each member of a team: blocks
// that are neighbours and read the same tokens. A unit is a request and a group. All units in a row
// make a line, on which a unit is as long as it has blocks of tokens, and somewhat longer for what
// else it costs. Every team takes an equal stretch of the line, its span; a unit that lies on
// several spans is computed in as many pieces, which are merged.
// What a unit costs besides its blocks, in blocks: with a wide tile there is more to begin and to
// end.
constexpr int kNarrowUnitCost = 2;
constexpr int kWideUnitCost = 6;
constexpr int kUnitCost = kRows > 32 ? kWideUnitCost : kNarrowUnitCost;
constexpr int kMergeCost = 5;  // of having any pieces to merge, in blocks
constexpr int kLeastSpan = 2;  // positions
constexpr int kMostSpans = 144;  // of so many pieces there is room for what is merged

// Of numbers that are not negative. Those of 64 bits are few, and take five times as long.
__device__ inline i64 quotient(i64 a, i64 b) {
  if (static_cast<u64>(a | b) >> 32 == 0) return static_cast<u32>(a) / static_cast<u32>(b);
  return a / b;
}

struct RequestFacts {
  i64 first_query;  // index of the request's first query token among all
  int q_len;
  int rows;  // none where the request's queries are not inside the tensor
  int kv_len;
  int blocks;  // of tokens
  int groups;
};

__device__ inline RequestFacts facts_of_request(const Params& params, int request) {
  RequestFacts facts;
  i64 q_len = params.q_len;
  facts.first_query = request * q_len;
  if (params.cum_seq_lens_q != nullptr) {
    facts.first_query = params.cum_seq_lens_q[request];
    q_len = params.cum_seq_lens_q[request + 1] - facts.first_query;
  }
  const bool is_inside = facts.first_query >= 0 && q_len >= 0 &&
                         (facts.first_query + q_len) * params.heads <= params.total_rows;
  facts.q_len = static_cast<int>(q_len);
  facts.rows = is_inside ? facts.q_len * params.heads : 0;
  facts.kv_len = tokens_held(params.seq_lens[request], table_row(params, request).pages);
  facts.blocks = ceil_div(facts.kv_len, kBlockTokens);
  const int tiles = ceil_div(facts.rows, kRows);
  // The usual cases without a division.
  facts.groups = params.team_size == 1   ? tiles
                 : params.team_size == 2 ? (tiles + 1) / 2
                                         : ceil_div(tiles, params.team_size);
  return facts;
}

// The span of a team: the line's positions from `begin` to before `end`.
struct Span {
  i64 total;  // length of the line
  int spans;  // in use
  int index;  // of this one; the last span is the first team's, so that no block waits for a later
  int unit_cost;
  i64 begin;
  i64 end;
};

// What a warp found of its requests.
struct WarpRequests {
  i64 length;  // of the line
  int blocks;  // of all requests, and their groups, if all are alike
  int groups;
  bool is_uniform;
};

struct SpanScratch {
  WarpRequests warps[kThreads / kWarpLanes];
  Span span;
  // The unit that comes next: the one that the span begins in, at first.
  RequestFacts facts;
  int request;
  int group;
  i64 unit_begin;
};

__device__ inline i64 line_length(const RequestFacts& facts, int unit_cost) {
  return static_cast<i64>(facts.groups) * (facts.blocks + unit_cost);
}

// How many spans of the same number of whole units, or whole units of the same number of spans,
// there are at the most; where all units have `blocks` blocks. None if merging pieces costs less
// than the idle teams would. By whole warps.
__device__ inline int aligned_spans(int teams, int units, int blocks) {
  const i64 total = static_cast<i64>(units) * blocks;
  teams = static_cast<int>(min(static_cast<i64>(teams), total));  // no span without a block
  const int spans = max(teams - lane_index(), 1);
  const bool is_aligned = units % spans == 0 || spans % units == 0;
  const bool is_cheap = total * teams <= (total + static_cast<i64>(kMergeCost) * teams) * spans;
  const u32 found = __ballot_sync(~0u, is_aligned && is_cheap);
  return found == 0 ? 0 : max(teams - __ffs(static_cast<int>(found)) + 1, 1);
}

// Finds the span of the team `team`, by all threads of the block, and leaves it in `scratch`; says
// whether there is one.
__device__ inline bool find_span(const Params& params, int team, SpanScratch& scratch) {
  const int each = ceil_div(params.requests, kThreads);
  const int first = static_cast<int>(threadIdx.x) * each;
  const int last = min(first + each, params.requests);
  RequestFacts facts;
  int blocks;  // of this thread's first request, and its groups
  int groups;
  bool is_uniform = true;
  i64 own = 0;
  // A thread behind the last request looks at that one, which is another's.
  for (int request = min(first, params.requests - 1); request < max(last, 1); ++request) {
    facts = facts_of_request(params, request);
    if (request <= first) {
      blocks = facts.blocks;
      groups = facts.groups;
    }
    is_uniform &= facts.blocks == blocks && facts.groups == groups;
    if (request >= first) own += line_length(facts, kUnitCost);
  }
  const int lane_0_blocks = __shfl_sync(~0u, blocks, 0);
  const int lane_0_groups = __shfl_sync(~0u, groups, 0);
  is_uniform &= blocks == lane_0_blocks && groups == lane_0_groups;
  is_uniform = __all_sync(~0u, is_uniform);
  i64 through = own;  // with all lanes before
#pragma unroll 1
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const i64 before = __shfl_up_sync(~0u, through, lanes);
    if (lane_index() >= lanes) through += before;
  }
  if (lane_index() == kWarpLanes - 1) {
    scratch.warps[warp_index()] = {through, blocks, groups, is_uniform};
  }
  __syncthreads();
  i64 begin = through - own;
  i64 total = 0;
  blocks = scratch.warps[0].blocks;
  groups = scratch.warps[0].groups;
  is_uniform = blocks > 0 && groups > 0;
#pragma unroll 4
  for (int warp = 0; warp < kThreads / kWarpLanes; ++warp) {
    const WarpRequests found = scratch.warps[warp];
    if (warp < warp_index()) begin += found.length;
    total += found.length;
    is_uniform &= found.is_uniform && found.blocks == blocks && found.groups == groups;
  }
  int spans =
      static_cast<int>(max(static_cast<i64>(1), min(static_cast<i64>(min(params.teams, kMostSpans)),
                                                    total / kLeastSpan)));
  int unit_cost = kUnitCost;
  if (is_uniform) {
    const int aligned = aligned_spans(spans, params.requests * groups, blocks);
    if (aligned > 0) {
      spans = aligned;
      unit_cost = 0;
      const i64 length = static_cast<i64>(groups) * blocks;
      total = params.requests * length;
      begin = min(first, params.requests) * length;
      own = max(last - first, 0) * length;
    }
  }
  const int index = spans - 1 - team;
  if (index < 0 || total == 0) return false;
  const i64 span_begin = quotient(index * total, spans);
  if (begin <= span_begin && span_begin < begin + own) {
    int request = first;
    // With one request a thread, its facts are at hand.
    while (each > 1) {
      facts = facts_of_request(params, request);
      if (span_begin < begin + line_length(facts, unit_cost)) break;
      begin += line_length(facts, unit_cost);
      ++request;
    }
    const int unit = facts.blocks + unit_cost;
    const int group = facts.groups == 1 ? 0 : static_cast<int>(quotient(span_begin - begin, unit));
    const i64 span_end = quotient((index + 1) * total, spans);
    scratch.span = {total, spans, index, unit_cost, span_begin, span_end};
    scratch.facts = facts;
    scratch.request = request;
    scratch.group = group;
    scratch.unit_begin = begin + static_cast<i64>(group) * unit;
  }
  __syncthreads();
  return true;
}

// The block of tokens that a position is in, counted from the unit's first; what comes before the
// blocks belongs to the first.
__device__ inline int block_at(i64 position, i64 unit_begin, const Span& span) {
  return static_cast<int>(max(position - unit_begin - span.unit_cost, static_cast<i64>(0)));
}

// Asks for what find_span and the loader will read first, before it may be read.
__device__ inline void prefetch_lengths(const Params& params) {
  const int request = static_cast<int>(threadIdx.x);
  if (request >= params.requests) return;
  prefetch_l2(params.seq_lens + request);
  if (params.table_starts == nullptr && params.max_pages > 0) {
    prefetch_l2(params.block_tables + request * static_cast<i64>(params.block_tables_stride));
  }
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
