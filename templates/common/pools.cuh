// Top-k indices into two pools: the list of a query token, and the address of the token that an
// entry names. Templates: without two pools, Params lacks these parameters.

#pragma once

#include "common/packed_row.cuh"
#include "common/paged_kv.cuh"
#include "common/types.cuh"
#include "config.cuh"

// The indices of a query token, those into the first pool first.
struct PooledIndices {
  const int* indices;
  const int* extra_indices;
  int num_indices;
  int num_extra_indices;

  __device__ int count() const { return num_indices + num_extra_indices; }

  // Whether index `i` is into the second pool.
  __device__ bool is_extra(int i) const { return i >= num_indices && num_extra_indices > 0; }

  // Of index `i`, less than `count`.
  __device__ const int* address_of(int i) const {
    return is_extra(i) ? extra_indices + (i - num_indices) : indices + i;
  }
  __device__ int read(int i) const { return *address_of(i); }
};

// Lengths are untrusted, and null means none.
__device__ inline int clamp_topk_length(const int* length, int topk) {
  return length == nullptr ? 0 : max(0, min(*length, topk));
}

template <typename PoolParams>
__device__ inline PooledIndices pooled_indices(const PoolParams& params, i64 query) {
  const int* extra_length =
      params.extra_topk_length == nullptr ? nullptr : params.extra_topk_length + query;
  return {params.block_tables + query * params.block_tables_stride,
          params.extra_indices + query * params.extra_indices_stride,
          clamp_topk_length(params.topk_length + query, params.topk),
          clamp_topk_length(extra_length, params.extra_topk)};
}

// One pool. An index counts the rows of all pages, of which the first `page_size` are tokens.
struct Pool {
  const unsigned char* cache;
  i64 page_stride;  // bytes
  i64 token_stride;  // bytes between data rows
  int num_pages;
  int page_size;
  u32 rows_per_page;
  u32 rows_per_page_mul;  // of the division, exact below 2^31; the host computes both
  int rows_per_page_shift;

  __device__ int page_of(int index) const {
    const u64 product = static_cast<u64>(static_cast<u32>(index)) * rows_per_page_mul;
    return static_cast<int>(product >> (32 + rows_per_page_shift));
  }

  __device__ int slot_of(int index, int page) const {
    return static_cast<int>(static_cast<u32>(index) - static_cast<u32>(page) * rows_per_page);
  }

  // Indices are untrusted.
  __device__ bool is_valid(int index, int page, int slot) const {
    return index >= 0 && is_valid_page(page, num_pages) && slot < page_size;
  }
};

template <typename PoolParams>
__device__ inline Pool pool_of(const PoolParams& params, bool is_extra) {
  return {is_extra ? params.extra_cache : params.cache,
          is_extra ? params.extra_page_stride : params.page_stride,
          is_extra ? params.extra_token_stride : params.token_stride,
          is_extra ? params.extra_num_pages : params.num_pages,
          is_extra ? params.extra_page_size : params.page_size,
          is_extra ? params.extra_rows_per_page : params.rows_per_page,
          is_extra ? params.extra_rows_per_page_mul : params.rows_per_page_mul,
          is_extra ? params.extra_rows_per_page_shift : params.rows_per_page_shift};
}

// The rows of a token: data row, and scale row if the format has one.
struct PooledToken {
  const unsigned char* data;  // of an invalid index, some row of the pool
  const unsigned char* scales;
  bool exists;
  bool is_extra;
};

template <typename PoolParams>
__device__ inline PooledToken pooled_token(const PoolParams& params, int index, bool is_extra) {
  const Pool pool = pool_of(params, is_extra);
  int page = pool.page_of(index);
  int slot = pool.slot_of(index, page);
  const bool exists = pool.is_valid(index, page, slot);
  if (!exists) page = slot = 0;
  const unsigned char* rows = pool.cache + page * pool.page_stride;
  const int data_bytes = is_extra ? ExtraKvRow::kDataBytes : KvRow::kDataBytes;
  const int scale_bytes = is_extra ? ExtraKvRow::kScaleRowBytes : KvRow::kScaleRowBytes;
  const unsigned char* scales =
      rows + static_cast<i64>(pool.page_size) * data_bytes + static_cast<i64>(slot) * scale_bytes;
  return {rows + slot * pool.token_stride, scales, exists, is_extra};
}
