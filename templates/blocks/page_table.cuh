// Where a token of a request lies in the paged cache. Needs blocks/prelude.cuh, kPageSize.

// The cache and one request's row of the block table.
struct PageTable {
  const unsigned char* cache;
  const int* pages;     // [max_pages] page ids; read only at index < ceil(tokens / kPageSize)
  int num_pages;        // pages of the cache
  i64 page_stride;      // bytes
  i64 token_stride;     // bytes

  __device__ int page_of(int token) const { return pages[token / kPageSize]; }

  // The row of `token`, or null if `page` is no page of the cache: such an id must not fault.
  __device__ const unsigned char* row_of(int page, int token) const {
    if (static_cast<u32>(page) >= static_cast<u32>(num_pages)) return nullptr;
    return cache + page * page_stride + (token % kPageSize) * token_stride;
  }
};
