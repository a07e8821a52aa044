// How the work of a call is divided among the blocks of the grid: each finds its own part.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "cu_seqlens.cuh"
#include "ptx/ld.cuh"
#include "seq_info.cuh"

// A team is some blocks of the grid that are neighbours. They read the same tokens at the same
// time, each those of its kv heads, which lie side by side in most caches; or the very same, for
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

// Requests whose lengths a lane asks for together; neighbours, that it adds up.
constexpr int kLaneRequests = 4;

// The lengths of such requests, from `first` on; behind the last one that one's.
struct LaneLengths {
  int each[kLaneRequests];

  __device__ LaneLengths(const Params& params, int first) {
#pragma unroll
    for (int i = 0; i < kLaneRequests; ++i) {
      each[i] = ld_relaxed_gpu(params.seq_lens + min(first + i, params.num_seqs - 1));
    }
  }

  __device__ bool differ_from(const LaneLengths& other) const {
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kLaneRequests; ++i) differ |= each[i] != other.each[i];
    return differ;
  }

  // The length of request `index` of these, of lane `lane`'s.
  __device__ int of_lane(int index, int lane) const {
    int length = each[0];
#pragma unroll
    for (int i = 1; i < kLaneRequests; ++i) length = i == index ? each[i] : length;
    return __shfl_sync(~0u, length, lane);
  }
};

__device__ inline int requests_of_lane(const Params& params) {
  return ceil_div(params.num_seqs, kWarpLanes);
}

// What the lane has of the first of its requests.
__device__ inline LaneLengths own_lengths(const Params& params) {
  return LaneLengths(params, lane_index() * requests_of_lane(params));
}

// The positions on the line that requests from `first` to before `end` take, all of one q_len.
__device__ inline u32 even_length(const Params& params, LaneLengths lengths, int first, int end) {
  RequestFacts facts;
  facts.q_len = params.q_len;
  facts.units = params.num_tiles;
  u32 sum = 0;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kLaneRequests; ++i) {
      set_tiles(params, facts, lengths.each[i]);
      sum += first + i < end ? line_length(facts) : 0;
    }
    first += kLaneRequests;
    if (first >= end) return sum;
    lengths = LaneLengths(params, first);
  }
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
// there is one. `lengths` are the lane's own_lengths.
__device__ inline bool find_span(const Params& params, const LaneLengths& lengths, Span& span,
                                 WalkState& walk) {
  const int each = requests_of_lane(params);
  const int first = min(lane_index() * each, params.num_seqs);
  const int end = min(first + each, params.num_seqs);
  u32 own = 0;
  bool is_unsound = false;
  if (params.cu_seqlens_q == nullptr) {
    own = even_length(params, lengths, first, end);
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
  span.spans = min(static_cast<u32>(params.num_cta_groups), span.total);
  span.index = blockIdx.x / params.cta_group_size;
  span.member = blockIdx.x - span.index * params.cta_group_size;
  if (span.index >= span.spans) return false;
  span.begin = span_begin(span.index, span.total, span.spans);
  span.end = span_begin(span.index + 1, span.total, span.spans);

  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, through > span.begin))) - 1;
  u32 begin = __shfl_sync(~0u, through - own, lane);
  walk.request = lane * each;
#pragma unroll 1
  while (true) {
    const int kv_len = each <= kLaneRequests ? lengths.of_lane(walk.request - lane * each, lane)
                                             : params.seq_lens[walk.request];
    walk.facts = facts_of_request(params, walk.request, kv_len);
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
