// Which rows and which tokens this block attends to. Needs Params, roles/mla_decode/constants.

// A row is one (query token, head) pair of a request, query token first, so that rows are
// contiguous in [tokens, heads, dim] tensors. A block takes kRows rows and one split of the tokens.
struct alignas(64) Work {
  int request;
  int split;
  int heads;
  int q_len;  // query tokens of this request
  int kv_len;  // tokens in the cache, the new ones included
  i64 first_query;  // index of the request's first query token among all
  int first_row;  // of this block, among the request's rows
  int rows;  // of this block; the rest of kRows is padding
  int visible_to_all;  // tokens that every row of this block sees
  int visible_to_any;  // tokens that some row sees
  int first_tile;
  int last_tile;  // one past

  // How many tokens `row` (0 to kRows - 1) sees: all up to its own position.
  __device__ int visible_tokens(int row) const {
    const int query = (first_row + row) / heads;
    const int visible = kv_len - q_len + query + 1;
    return row >= rows || visible < 0 ? 0 : visible;
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(int row) const { return first_query * heads + first_row + row; }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  int block = static_cast<int>(blockIdx.x);
  const int row_tile = block % params.row_tiles;
  block /= params.row_tiles;
  work.split = block % params.splits;
  work.request = block / params.splits;

  work.heads = params.heads;
  if (params.cum_seq_lens_q == nullptr) {
    work.q_len = params.q_len;
    work.first_query = static_cast<i64>(work.request) * params.q_len;
  } else {
    work.first_query = params.cum_seq_lens_q[work.request];
    work.q_len = params.cum_seq_lens_q[work.request + 1] - static_cast<int>(work.first_query);
  }
  work.first_row = row_tile * kRows;
  const i64 request_rows = static_cast<i64>(work.q_len) * work.heads;
  const i64 before = work.first_query * work.heads;
  // Query tokens outside the tensor are nobody's: nothing may be read or written there.
  const bool is_outside = before < 0 || before + request_rows > params.total_rows;
  work.rows = is_outside
                  ? 0
                  : static_cast<int>(min(static_cast<i64>(kRows), request_rows - work.first_row));

  // A length beyond the table, or a negative one, is read as the nearest that the table can hold.
  const i64 capacity = static_cast<i64>(params.max_pages) * kPageSize;
  const i64 length = params.seq_lens[work.request];
  work.kv_len = static_cast<int>(max(static_cast<i64>(0), min(length, capacity)));
  work.visible_to_all = work.visible_tokens(0);
  work.visible_to_any = work.visible_tokens(work.rows - 1);

  const int tiles = ceil_div(work.visible_to_any, kTileTokens);
  const int tiles_per_split = ceil_div(tiles, params.splits);
  work.first_tile = min(tiles, work.split * tiles_per_split);
  work.last_tile = min(tiles, work.first_tile + tiles_per_split);
  return work;
}
