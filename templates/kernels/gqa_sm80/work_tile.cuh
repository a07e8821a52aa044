// Which rows and which tokens this block attends to.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/ragged_tiles.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, query head of a kv head) pair of a request, query token first. A block
// takes kRows rows of one kv head, a slice of their output elements and one split of the tokens.
struct alignas(16) Work {
  int request;
  int kv_head;
  int slice;
  int split;
  int q_len;  // query tokens of this request
  i64 first_query;  // index of the request's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this block, among the request's rows
  int rows;  // of this block; the rest of kRows is padding
  int all_begin, all_end;  // tokens that every row of this block sees
  int any_begin, any_end;  // tokens that some row may see
  int first_group, last_group;  // of kWarpTokens tokens each, that are this split's

  __device__ int query_of(const Params& params, int row) const {
    return (first_row + row) / params.group_size;
  }

  // The first token that a query token's window reaches back to.
  __device__ int window_begin(const Params& params, int query) const {
    return params.window > 0 ? max(0, kv_len - q_len + query + 1 - params.window) : 0;
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group_size + (first_row + row) % params.group_size;
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group_size * params.kv_heads + head_of(params, row);
  }

  // Whether a row of this block sees a token that not all of them see.
  __device__ bool sees(const Params& params, int row, int token) const {
    if (row >= rows || token >= kv_len) return false;
    const int query = query_of(params, row);
    if (token < window_begin(params, query)) return false;
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return draft <= query;
    const u32* words = params.draft_mask + (first_query + query) * params.mask_words;
    // Drafts beyond the mask are in no row's sight.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  int block = static_cast<int>(blockIdx.x);
  const int tile = block % params.row_tiles;
  block /= params.row_tiles;
  work.slice = block % kSlices;
  block /= kSlices;
  work.kv_head = block % params.kv_heads;
  block /= params.kv_heads;
  work.split = block % params.num_splits;
  const i64 tokens = params.total_rows / (static_cast<i64>(params.group_size) * params.kv_heads);
  const TileRows found = rows_of_tile(params.cu_seqlens_q, params.num_seqs, params.q_len,
                                      params.group_size, tokens, block / params.num_splits, tile);
  work.request = found.request;
  work.q_len = found.q_len;
  work.first_query = found.first_query;
  work.first_row = found.first_row;
  work.rows = found.rows;
  work.kv_len = tokens_held(params.seq_lens[work.request], params.max_pages);

  const int first = work.query_of(params, 0);
  const int last = work.query_of(params, max(work.rows, 1) - 1);
  const int before = work.kv_len - work.q_len;  // tokens before the new ones
  const bool has_mask = params.draft_mask != nullptr;
  work.any_begin = work.window_begin(params, first);
  work.all_begin = work.window_begin(params, last);
  work.any_end = max(has_mask ? work.kv_len : before + last + 1, 0);
  work.all_end = max(has_mask ? before : before + first + 1, 0);

  const int begin = work.any_begin / kWarpTokens;
  const int groups = max(ceil_div(work.any_end, kWarpTokens) - begin, 0);
  const int per_split = ceil_div(ceil_div(groups, kWarps), params.num_splits) * kWarps;
  work.first_group = begin + min(groups, work.split * per_split);
  work.last_group = min(begin + groups, work.first_group + per_split);
  return work;
}
