// How the work of a call is divided among the blocks of the grid: each warp finds the part of its
// block by itself. Needs Params, requests.cuh,
// blocks/query_offsets.cuh.

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

// A lane adds up neighbouring requests: how many, and the first; a lane behind the last request
// looks at that one.
__device__ inline int requests_of_lane(const Params& params) {
  return ceil_div(params.requests, kWarpLanes);
}

__device__ inline int own_request(const Params& params) {
  return min(lane_index() * requests_of_lane(params), params.requests - 1);
}

// Finds the span of this block's team and the unit that it begins in, by whole warps; says whether
// there is one. `length` is what seq_lens has for the lane's own_request.
__device__ inline bool find_span(const Params& params, int length, Span& span, WalkState& walk) {
  const int each = requests_of_lane(params);
  const int first = lane_index() * each;
  u32 own = line_length(facts_of_request(params, own_request(params), length));
  bool is_unsound = goes_back(params, own_request(params));
  if (first >= params.requests) own = 0;
#pragma unroll 4
  for (int i = first + 1; i < first + each; ++i) {
    const int request = min(i, params.requests - 1);
    const u32 more = line_length(facts_of_request(params, request));
    own += i < params.requests ? more : 0;
    is_unsound |= goes_back(params, request);
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
  walk.facts = facts_of_request(params, walk.request);
#pragma unroll 1
  while (span.begin - begin >= line_length(walk.facts)) {
    begin += line_length(walk.facts);
    walk.facts = facts_of_request(params, ++walk.request);
  }
  const u32 each_unit = unit_length(walk.facts);
  const u32 unit = (span.begin - begin) / each_unit;
  walk.unit = static_cast<int>(unit);
  walk.unit_begin = begin + unit * each_unit;
  return true;
}
