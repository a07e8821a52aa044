// Copies the block's rows of the query into shared memory. Needs Work, blocks/swizzle.cuh.

__device__ inline void load_query(const Params& params, const Work& work, SharedMemory& shared) {
  const int chunk = lane_index() % kChunkElements;
  for (int row = static_cast<int>(threadIdx.x) / kChunkElements; row < kRows;
       row += kThreads / kChunkElements) {
    const int packed_row = work.first_row + row;
    const i64 query = work.first_query + packed_row / work.heads;
    const int head = packed_row % work.heads;
    const bool is_padding = row >= work.rows;
    const u16* source =
        is_padding ? params.query
                   : params.query + query * params.query_stride + head * params.query_head_stride;
    const u32 target = shared_address(shared.query) + swizzled_offset<kTokenBytes>(row, chunk);
#pragma unroll
    for (int column = 0; column < kTokenBytes / 128; ++column) {
      cp_async_cg_16(target + column * 128, source + (column * 8 + chunk) * kChunkElements,
                     is_padding ? 0 : kChunkBytes);
    }
  }
}
