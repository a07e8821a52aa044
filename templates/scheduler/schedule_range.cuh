// How the work of a call is divided among the blocks of the grid: each finds its own part.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "seq_info.cuh"

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

struct RequestFacts {
  i64 first_query;  // index of the request's first query token among all
  int q_len;  // minus one where they end before they begin
  int rows;  // none where the request's queries are not inside the tensor
  int kv_len;
  int blocks;  // of tokens
  int groups;
};

// A number of members as teams, of four members at the most: by constants, for a division takes
// long, and without branches.
__device__ inline int in_teams(const Params& params, u32 members) {
  return static_cast<int>(params.cta_group_size == 3 ? members / 3
                                                     : members >> params.cta_group_size / 2);
}

// `length` is what length_of has for the request.
__device__ inline RequestFacts facts_of_request(const Params& params, int request, int length) {
  RequestFacts facts;
  facts.q_len = kIsSparse ? 1 : params.q_len;  // a list belongs to one query token
  facts.first_query = static_cast<i64>(request) * facts.q_len;
  bool is_inside = true;
  if (!kIsSparse && params.cu_seqlens_q != nullptr) {
    facts.first_query = params.cu_seqlens_q[request];
    const i64 end = params.cu_seqlens_q[request + 1];
    const i64 q_len = min(end - facts.first_query, static_cast<i64>(0x7fffffff));
    facts.q_len = static_cast<int>(max(q_len, static_cast<i64>(-1)));
    is_inside = 0 <= facts.first_query && facts.first_query <= end &&
                end * params.heads <= params.total_rows;
  }
  facts.rows = is_inside ? facts.q_len * params.heads : 0;
  facts.kv_len = tokens_of(params, request, length);
  facts.blocks = static_cast<u32>(facts.kv_len + kBlockTokens - 1) / kBlockTokens;
  const u32 tiles = static_cast<u32>(facts.rows + kRows - 1) / kRows;
  facts.groups = in_teams(params, tiles + params.cta_group_size - 1);
  return facts;
}

__device__ inline RequestFacts facts_of_request(const Params& params, int request) {
  return facts_of_request(params, request, length_of(params, request));
}

// The span of a team: the line's positions from `begin` to before `end`. The host sees to it that
// they fit.
struct Span {
  int total;  // length of the line
  int spans;  // in use
  int index;  // of this one; the last span is the first team's, so that no block waits for a later
  int unit_cost;
  int begin;
  int end;
};

// What a warp found of its requests.
enum class Requests { kUnsound, kMixed, kUniform };

struct alignas(kChunkBytes) WarpRequests {
  int length;  // of the line
  int blocks;  // of all requests, and their groups, if they are uniform
  int groups;
  Requests kind;
};

// Where a walk along the units is.
struct WalkState {
  RequestFacts facts;
  int request;
  int group;
  int unit_begin;
};

// Which queries and tokens an item is about: as much as loading them takes.
struct Part {
  i64 first_query;  // index of the request's first query token among all
  int request;  // minus one after the last item
  int first_row;  // of the tile, among the request's rows
  int rows;  // of the tile; the rest of kRows is padding
  int first_block;
  int blocks;  // of tokens, that this piece computes
  int visible_to_any;  // tokens that some row of the tile sees
};
constexpr Part kNoPart = {0, -1, 0, 0, 0, 0, 0};

// What a block begins with.
struct alignas(kChunkBytes) Beginning {
  Span span;
  WalkState first;  // at the first item; while that is looked for, at the unit that the span begins
                    // in, or before it
  Part part;  // of the first item
};

struct SpanScratch : Beginning {
  WarpRequests warps[kThreads / kWarpLanes];
  WalkState now;  // at the item that was handed on last
};

__device__ inline int line_length(const RequestFacts& facts, int unit_cost) {
  return facts.groups * (facts.blocks + unit_cost);
}

// Whether `a` is a multiple of `b`; of large numbers it may say no.
__device__ inline bool is_multiple(int a, int b) {
  return __float2int_rn(__fdividef(static_cast<float>(a), static_cast<float>(b))) * b == a;
}

// How many spans of the same number of whole units, or whole units of the same number of spans,
// there are at the most; where all units have `blocks` blocks. None if merging pieces costs less
// than the idle teams would. By whole warps.
__device__ inline int aligned_spans(int teams, int units, int blocks) {
  const int total = units * blocks;
  teams = min(teams, total);  // no span without a block
  const int spans = max(teams - lane_index(), 1);
  const bool is_aligned = is_multiple(units, spans) || is_multiple(spans, units);
  const bool is_cheap =
      static_cast<i64>(total) * teams <= (total + static_cast<i64>(kMergeCost) * teams) * spans;
  const u32 found = __ballot_sync(~0u, is_aligned && is_cheap);
  return found == 0 ? 0 : max(teams - __ffs(static_cast<int>(found)) + 1, 1);
}

// Where span `index` begins: index * total / spans, with `whole` and `rest` of the quotient of the
// last two. In floats, in which such small numbers lose nothing, a division is short.
__device__ inline int beginning_of(int index, int whole, int rest, int spans) {
  const float part = __fdividef(static_cast<float>(index * rest) + 0.5f, static_cast<float>(spans));
  return index * whole + __float2int_rz(part);
}

// How many requests a thread counts the blocks of, and the first; a thread behind the last request
// looks at that one.
__device__ inline int requests_of_thread(const Params& params) {
  return ceil_div(params.num_seqs, kThreads);
}

__device__ inline int own_request(const Params& params) {
  const int first = static_cast<int>(threadIdx.x) * requests_of_thread(params);
  return min(first, params.num_seqs - 1);
}

// Finds the span of the team `team`, by all threads of the block, and leaves it in `scratch`; says
// whether there is one. `length` is what length_of has for the thread's own_request.
__device__ inline bool find_span(const Params& params, int team, int length, SpanScratch& scratch) {
  const int each = requests_of_thread(params);
  const int first = static_cast<int>(threadIdx.x) * each;
  const int last = min(first + each, params.num_seqs);
  const int end = own_request(params);
  RequestFacts facts;  // in the end of the first
  int blocks = 0;
  int groups = 0;
  int own = 0;
  bool is_uniform = true;
  bool is_unsound = false;
#pragma unroll 1
  for (int request = last - 1; request >= end; --request) {
    facts = facts_of_request(params, request, request == end ? length : length_of(params, request));
    is_uniform &= request == last - 1 || (facts.blocks == blocks && facts.groups == groups);
    is_unsound |= facts.q_len < 0;
    blocks = facts.blocks;
    groups = facts.groups;
    own += line_length(facts, kUnitCost);
  }
  if (first >= last) own = 0;
  // All lanes take part in both.
  const int lane_0_blocks = __shfl_sync(~0u, blocks, 0);
  const int lane_0_groups = __shfl_sync(~0u, groups, 0);
  is_uniform = __all_sync(~0u, is_uniform && blocks == lane_0_blocks && groups == lane_0_groups);
  is_unsound = __any_sync(~0u, is_unsound);
  int through = own;  // with all lanes before
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const int before = __shfl_up_sync(~0u, through, lanes);
    if (lane_index() >= lanes) through += before;
  }
  if (lane_index() == kWarpLanes - 1) {
    const Requests kind = is_uniform ? Requests::kUniform : Requests::kMixed;
    scratch.warps[warp_index()] = {through, blocks, groups, is_unsound ? Requests::kUnsound : kind};
  }
  __syncthreads();
  // A lane looks at what one warp found; there are fewer warps than lanes.
  constexpr int kWarps = kThreads / kWarpLanes;
  const WarpRequests found = scratch.warps[min(lane_index(), kWarps - 1)];
  const int length_of_warp = lane_index() < kWarps ? found.length : 0;
  int total = __reduce_add_sync(~0u, length_of_warp);
  int begin = __reduce_add_sync(~0u, lane_index() < warp_index() ? length_of_warp : 0);
  begin += through - own;
  blocks = __shfl_sync(~0u, found.blocks, 0);
  groups = __shfl_sync(~0u, found.groups, 0);
  if (__any_sync(~0u, found.kind == Requests::kUnsound)) return false;
  is_uniform = __all_sync(~0u, found.kind == Requests::kUniform && found.blocks == blocks &&
                                   found.groups == groups && blocks > 0 && groups > 0);
  int spans = max(1, min(min(params.num_cta_groups, kMostSpans), total / kLeastSpan));
  int unit_cost = kUnitCost;
  if (is_uniform) {
    const int aligned = aligned_spans(spans, params.num_seqs * groups, blocks);
    if (aligned > 0) {
      spans = aligned;
      unit_cost = 0;
      const int of_request = groups * blocks;
      total = params.num_seqs * of_request;
      begin = min(first, params.num_seqs) * of_request;
      own = max(last - first, 0) * of_request;
    }
  }
  const int index = spans - 1 - team;
  if (index < 0 || total == 0) return false;
  const int whole = static_cast<u32>(total) / static_cast<u32>(spans);
  const int rest = total - whole * spans;
  const int span_begin = beginning_of(index, whole, rest, spans);
  if (begin <= span_begin && span_begin < begin + own) {
    const int unit = facts.blocks + unit_cost;
    // It may begin in a later one of the thread's requests, to which the walk comes.
    int group = 0;
    if (facts.groups != 1) {
      group = min(static_cast<int>(static_cast<u32>(span_begin - begin) / unit), facts.groups - 1);
    }
    const int span_end = beginning_of(index + 1, whole, rest, spans);
    scratch.span = {total, spans, index, unit_cost, span_begin, span_end};
    scratch.first = {facts, first, group, begin + group * unit};
  }
  __syncthreads();
  return true;
}
