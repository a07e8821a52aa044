// How many tokens a request has, where tables lead to its pages. Needs Params,
// blocks/table_row.cuh.

__device__ inline int length_of(const Params& params, int request) {
  return params.seq_lens[request];
}

// `length` is what length_of has for it.
__device__ inline int tokens_of(const Params& params, int request, int length) {
  return tokens_held(length, table_row(params, request).pages);
}
