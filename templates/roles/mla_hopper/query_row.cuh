// Where the rows of a query lie in the caller's tensors. Needs Params, Part.

// Of row `row` of the tile, or where it is padding of some row: index of the query token among all,
// and its head.
struct QueryRow {
  i64 query;
  int head;
};

__device__ inline QueryRow query_row(const Params& params, const Part& part, int row, bool is_row) {
  const int packed_row = is_row ? part.first_row + row : 0;
  // Mostly there is one token, and division takes long.
  const int token = packed_row < params.heads ? 0 : packed_row / params.heads;
  const int head = packed_row - token * params.heads;
  return {is_row ? part.first_query + token : 0, head};
}
