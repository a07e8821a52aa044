// Paged KV cache: addresses of tokens, and L2 hints of their loads.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "ptx/load.cuh"

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

// Block tables of values. A template: Params of a kernel with one table for both lacks it.
template <typename SeparateParams>
__device__ inline const int* value_tables_of(const SeparateParams& params) {
  return params.value_tables;
}

constexpr int kMaxKvLen = 0x7fff0000;  // one more tile still fits in an int

// KV length of a sequence, clamped to what a table of `num_pages` pages holds: `seq_lens` is
// untrusted.
__device__ inline int clamp_kv_len(i64 seq_len, i64 num_pages) {
  constexpr i64 kMax = kMaxKvLen;
  return static_cast<int>(max(static_cast<i64>(0), min(min(seq_len, num_pages * kPageSize), kMax)));
}

// Page ids are untrusted: one outside the cache must not fault.
__device__ inline bool is_valid_page(int page, int num_pages) {
  return static_cast<u32>(page) < static_cast<u32>(num_pages);
}

// What createpolicy_evict_first returns. Copies take a policy from uniform registers, where only a
// constant is without an instruction per copy.
constexpr u64 kEvictFirst = 0x12f0000000000000;

// Evict-first keeps Q and partial O resident and avoids write-backs between reads, which cost far
// more bandwidth than their bytes. Two CTAs that read a tile still meet in L2; more drift apart.
__device__ inline u64 kv_cache_hint(int readers) {
  return readers > 2 ? createpolicy_evict_normal() : createpolicy_evict_first();
}
