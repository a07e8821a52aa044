// Which rows of which request a tile holds, also where requests have queries of different
// lengths. What ends of queries say is not trusted.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// The last request that begins at or before `position`; `begin_of` says where a request begins.
template <typename BeginOf>
__device__ inline int request_at(i64 position, int requests, BeginOf begin_of) {
  int low = 0;
  int high = requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begin_of(middle) <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Request r takes the tiles from floor(its first row / kRows) + r on: as many as its rows fill, or
// one more. So the number of tiles follows from the number of rows, and no length is needed on the
// host.
__device__ inline i64 first_tile_of(const int* cum_seq_lens_q, int request, int rows_per_token) {
  return static_cast<i64>(cum_seq_lens_q[request]) * rows_per_token / kRows + request;
}

__device__ inline int request_of_tile(const int* cum_seq_lens_q, int requests, int rows_per_token,
                                      int tile) {
  return request_at(tile, requests, [&](int request) {
    return first_tile_of(cum_seq_lens_q, request, rows_per_token);
  });
}

__device__ inline int request_of_token(const int* cum_seq_lens_q, int requests, int token) {
  return request_at(token, requests, [&](int request) -> i64 { return cum_seq_lens_q[request]; });
}

// The rows of a tile: the rest of kRows is padding.
struct TileRows {
  int request;
  int q_len;  // query tokens of the request
  i64 first_query;  // index of its first query token among all
  int first_row;  // of the tile, among the request's rows
  int rows;
};

// The rows of tile `tile` of request `request`, each of whose requests has `q_len` query tokens,
// or, where ends of queries are given, of the request that they say. Query tokens outside the
// tensor are nobody's: nothing may be read or written there.
__device__ inline TileRows rows_of_tile(const int* cum_seq_lens_q, int requests, i64 q_len,
                                        int rows_per_token, i64 tokens, int request, i64 tile) {
  i64 first_query = request * q_len;
  if (cum_seq_lens_q != nullptr) {
    request = request_of_tile(cum_seq_lens_q, requests, rows_per_token, static_cast<int>(tile));
    tile -= first_tile_of(cum_seq_lens_q, request, rows_per_token);
    first_query = cum_seq_lens_q[request];
    q_len = cum_seq_lens_q[request + 1] - first_query;
  }
  const i64 first_row = tile * kRows;
  const bool is_inside =
      first_query >= 0 && q_len >= 0 && first_query + q_len <= tokens && first_row >= 0;
  const i64 rows = min(q_len * rows_per_token - first_row, static_cast<i64>(kRows));
  return {request, static_cast<int>(q_len), first_query, static_cast<int>(first_row),
          is_inside && rows > 0 ? static_cast<int>(rows) : 0};
}
