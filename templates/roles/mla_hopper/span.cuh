// How the work of a call is divided among the blocks of the grid: each finds its own part. Needs
// Params, blocks/table_row.cuh, ptx/prefetch.cuh, roles/mla_hopper/constants.

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

// Asks for what find_span and the loader will read first, before it may be read.
__device__ inline void prefetch_lengths(const Params& params) {
  const int request = static_cast<int>(threadIdx.x);
  if (request >= params.requests) return;
  prefetch_l2(params.seq_lens + request);
  if (params.table_starts == nullptr && params.max_pages > 0) {
    prefetch_l2(params.block_tables + request * static_cast<i64>(params.block_tables_stride));
  }
}
