// Which rows and which tokens this block attends to.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/ragged_tiles.cuh"
#include "common/topk_length.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, head) pair of a request, query token first, so that rows are
// contiguous in [tokens, heads, dim] tensors. A block takes kRows rows and one split of the tokens.
// Where every query token has a list of tokens of its own, it counts as a request.
struct alignas(64) Work {
  int request;
  int split;
  int heads;
  int q_len;  // query tokens of this request
  i64 first_query;  // index of the request's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this block, among the request's rows
  int rows;  // of this block; the rest of kRows is padding
  int is_causal;
  int visible_to_all;  // tokens that every row of this block sees
  int visible_to_any;  // tokens that some row sees
  int first_tile;
  int last_tile;  // one past

  // How many tokens `row` (0 to kRows - 1) sees: all up to its own position, or all.
  __device__ int visible_tokens(int row) const {
    const int later = is_causal ? q_len - 1 - (first_row + row) / heads : 0;
    return row >= rows ? 0 : max(kv_len - later, 0);
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(int row) const { return first_query * heads + first_row + row; }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  const int block = static_cast<int>(blockIdx.x);
  const int tile = block % params.row_tiles;
  const int* ends = kIsSparse ? nullptr : params.cu_seqlens_q;
  const TileRows found = rows_of_tile(ends, params.num_seqs, kIsSparse ? 1 : params.q_len,
                                      params.heads, params.total_rows / params.heads,
                                      block / params.row_tiles / params.num_splits, tile);
  work.request = found.request;
  work.split = block / params.row_tiles % params.num_splits;
  work.heads = params.heads;
  work.q_len = found.q_len;
  work.first_query = found.first_query;
  work.first_row = found.first_row;
  work.rows = found.rows;
  work.is_causal = params.is_causal;

  const TokenLists lists{params.seq_lens, params.topk_length, params.cu_seqlens_q,
                         params.num_seqs, params.q_len,       params.topk};
  work.kv_len =
      kIsSparse ? listed_tokens(lists, work.request)
                : tokens_held(params.seq_lens[work.request], table_row(params, work.request).pages);
  work.visible_to_all = work.visible_tokens(0);
  work.visible_to_any = work.visible_tokens(work.rows - 1);

  const int tiles = ceil_div(work.visible_to_any, kTileTokens);
  const int tiles_per_split = ceil_div(tiles, params.num_splits);
  work.first_tile = min(tiles, work.split * tiles_per_split);
  work.last_tile = min(tiles, work.first_tile + tiles_per_split);
  return work;
}
