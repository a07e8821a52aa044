// Which request a tile of rows belongs to, where requests have queries of different lengths.
// Needs blocks/prelude.cuh, kRows.

// Request r takes the tiles from floor(its first row / kRows) + r on: as many as its rows fill, or
// one more. So the number of tiles follows from the number of rows, and no length is needed on the
// host.
__device__ inline i64 first_tile_of(const int* cum_seq_lens_q, int request, int rows_per_token) {
  return static_cast<i64>(cum_seq_lens_q[request]) * rows_per_token / kRows + request;
}

// The request of `tile`: the last one that begins at or before it.
__device__ inline int request_of_tile(const int* cum_seq_lens_q, int requests, int rows_per_token,
                                      int tile) {
  int low = 0;
  int high = requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_tile_of(cum_seq_lens_q, middle, rows_per_token) <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The request of query token `token`.
__device__ inline int request_of_token(const int* cum_seq_lens_q, int requests, int token) {
  int low = 0;
  int high = requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (cum_seq_lens_q[middle] <= token) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}
