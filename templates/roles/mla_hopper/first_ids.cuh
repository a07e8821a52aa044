// Asks for the first page ids, or listed tokens, of every request, which loaders read first where
// an item begins with its request. Needs Params, ptx/prefetch.cuh.

__device__ inline void prefetch_ids(const Params& params) {
  const int request = static_cast<int>(threadIdx.x);
  if (request >= params.requests || params.max_pages == 0) return;
  if (params.table_starts != nullptr) return;
  prefetch_l2(params.block_tables + request * static_cast<i64>(params.block_tables_stride));
}
