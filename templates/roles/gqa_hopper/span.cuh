// How the work of a call is divided among the blocks of the grid: each finds its own part. Needs
// Params, requests.cuh, blocks/query_offsets.cuh.

// A team is some blocks of the grid that are neighbours. They read the same tokens at the same
// time, each those of its kv head, which lie side by side in most caches; or the very same, for
// another tile of rows. All units in a row make a line. Every team takes an equal stretch of it,
// its span; a unit that lies on several spans is computed in as many pieces, which are merged. The
// host sees to it that the length of the line times the number of spans fits into 32 bits.
struct Span {
  u32 total;  // length of the line
  u32 spans;  // in use
  u32 index;  // of this one
  u32 begin;  // positions on the line
  u32 end;
  u32 member;  // of the team
};

// Where a walk along the units is.
struct WalkState {
  RequestFacts facts;
  int request;
  int unit;  // of the request
  u32 unit_begin;
};

__device__ inline u32 span_begin(u32 index, u32 total, u32 spans) { return index * total / spans; }

// The span that a position lies on.
__device__ inline u32 span_at(u32 position, const Span& span) {
  return ((position + 1) * span.spans - 1) / span.total;
}

// The positions on the line that requests from `first` to before `end` take, all of one q_len.
__device__ inline u32 even_length(const Params& params, int first, int end) {
  constexpr int kAtATime = 4;  // lengths that are asked for together
  RequestFacts facts;
  facts.q_len = params.q_len;
  facts.units = params.units;
  u32 sum = 0;
#pragma unroll 1
  for (; first < end; first += kAtATime) {
    int each[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) each[i] = params.seq_lens[min(first + i, end - 1)];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) {
      set_tiles(params, facts, each[i]);
      sum += first + i < end ? line_length(facts) : 0;
    }
  }
  return sum;
}

// The same where requests differ in their queries; finds out whether their offsets go back.
__device__ inline u32 ragged_length(const Params& params, int first, int end, bool& goes_back_any) {
  u32 sum = 0;
#pragma unroll 1
  for (; first < end; ++first) {
    sum += line_length(facts_of_request(params, first, params.seq_lens[first]));
    goes_back_any |= goes_back(params, first);
  }
  return sum;
}

// Finds the span of this block's team and the unit that it begins in, by a whole warp; says whether
// there is one.
__device__ inline bool find_span(const Params& params, Span& span, WalkState& walk) {
  // A lane adds up neighbouring requests.
  const int each = ceil_div(params.requests, kWarpLanes);
  const int first = min(lane_index() * each, params.requests);
  const int end = min(first + each, params.requests);
  u32 own = 0;
  bool is_unsound = false;
  if (params.cum_seq_lens_q == nullptr) {
    own = even_length(params, first, end);
  } else {
    own = ragged_length(params, first, end, is_unsound);
  }
  if (__any_sync(~0u, is_unsound)) return false;
  u32 through = own;  // with all lanes before
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const u32 before = __shfl_up_sync(~0u, through, lanes);
    if (lane_index() >= lanes) through += before;
  }
  span.total = __shfl_sync(~0u, through, kWarpLanes - 1);
  span.spans = min(static_cast<u32>(params.teams), span.total);
  span.index = blockIdx.x / params.team_size;
  span.member = blockIdx.x - span.index * params.team_size;
  if (span.index >= span.spans) return false;
  span.begin = span_begin(span.index, span.total, span.spans);
  span.end = span_begin(span.index + 1, span.total, span.spans);

  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, through > span.begin))) - 1;
  u32 begin = __shfl_sync(~0u, through - own, lane);
  walk.request = lane * each;
#pragma unroll 1
  while (true) {
    walk.facts = facts_of_request(params, walk.request);
    const u32 length = line_length(walk.facts);
    if (span.begin - begin < length) break;
    begin += length;
    ++walk.request;
  }
  const u32 each_unit = unit_length(walk.facts);
  const u32 unit = (span.begin - begin) / each_unit;
  walk.unit = static_cast<int>(unit);
  walk.unit_begin = begin + unit * each_unit;
  return true;
}
