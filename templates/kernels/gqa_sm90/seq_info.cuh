// What a request is to the kernel: its rows, and the tokens that they see.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, query head of a kv head) pair of a request, query token first.
struct RequestFacts {
  int first_query;  // index of the request's first query token among all
  int q_len;
  int kv_len;  // tokens in the cache, the new ones included
  int row_tiles;  // of one kv head; none where the request's queries are not inside the tensor
  int units;
  int first_tile;  // of tokens, that some row sees
  int tiles;  // of tokens, from that one on
};

// The first token that the window of a query token reaches back to.
__device__ inline int window_begin(const Params& params, int kv_len, int q_len, int query) {
  return max(0, max(0, kv_len - q_len + query + 1) - params.window);
}

// Sets the tiles of tokens that some row sees.
__device__ inline void set_tiles(const Params& params, RequestFacts& facts, int length) {
  facts.kv_len = min(max(length, 0), params.max_tokens);
  facts.first_tile = window_begin(params, facts.kv_len, facts.q_len, 0) / kTileTokens;
  facts.tiles = ceil_div(facts.kv_len, kTileTokens) - facts.first_tile;
}

// `length` is what seq_lens has for the request.
__device__ inline RequestFacts facts_of_request(const Params& params, int request, int length) {
  RequestFacts facts;
  facts.q_len = params.q_len;
  facts.row_tiles = params.row_tiles;
  facts.units = params.num_tiles;
  facts.first_query = request * params.q_len;
  if (params.cu_seqlens_q != nullptr) {
    const int first = params.cu_seqlens_q[request];
    const int end = params.cu_seqlens_q[request + 1];
    const bool is_inside = first >= 0 && first <= end && end <= params.tokens;
    facts.first_query = first;
    facts.q_len = is_inside ? end - first : 0;
    facts.row_tiles = ceil_div(facts.q_len * params.group_size, kRows);
    facts.units = facts.row_tiles * params.num_tiles;  // those of one tile for each kv head
  }
  set_tiles(params, facts, length);
  return facts;
}

__device__ inline RequestFacts facts_of_request(const Params& params, int request) {
  return facts_of_request(params, request, params.seq_lens[request]);
}

// A part is a tile of rows of a kv head of a request, or of the heads that a block takes. As many
// parts as a team has members are a unit; units of a request are alike. Positions that a unit takes
// on the line of work: one for each tile of tokens, and one if there is none, so that somebody
// writes its zeros.
__device__ inline u32 unit_length(const RequestFacts& facts) {
  return static_cast<u32>(max(facts.tiles, 1));
}

__device__ inline u32 line_length(const RequestFacts& facts) {
  return static_cast<u32>(facts.units) * unit_length(facts);
}
