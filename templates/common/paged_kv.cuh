// Where a token of a request lies in the paged cache.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// One tensor of the cache; strides in bytes.
struct PagedRows {
  const unsigned char* rows;
  i64 page_stride;
  i64 token_stride;

  // The row in `slot` of `page`, which exists.
  __device__ const unsigned char* row_of(int page, int slot) const {
    return rows + page * page_stride + slot * token_stride;
  }
};

constexpr int kMostTokens = 0x7fff0000;  // a tile more can still be counted

// How many tokens a request of length `length` has in a table of `pages` pages: a length beyond the
// table, or a negative one, is read as the nearest that the table can hold.
__device__ inline int tokens_held(i64 length, i64 pages) {
  constexpr i64 kMost = kMostTokens;
  return static_cast<int>(max(static_cast<i64>(0), min(min(length, pages * kPageSize), kMost)));
}

// An id outside the cache must not fault.
__device__ inline bool is_page(int page, int num_pages) {
  return static_cast<u32>(page) < static_cast<u32>(num_pages);
}
