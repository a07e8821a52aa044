// Block indices of a sparse call. Every query token is a sequence to the kernel: its KV tokens are
// those that its indices name, in their order. Templates: Params of a dense kernel lacks the
// parameters. Indices, requests and page ids are untrusted.

#pragma once

#include "common/paged_kv.cuh"
#include "common/types.cuh"
#include "config.cuh"

// Without block tables an index names a token of the cache, page by page, and there are as many
// indices as the length of the query token says.

// The request of a query token, and the end of the request's tokens that it attends to.
struct SparseSeq {
  int seq_idx;
  int kv_end;  // 0: it attends to nothing
};

template <typename SparseParams>
__device__ inline SparseSeq sparse_seq_of(const SparseParams& params, int token) {
  if (params.block_tables == nullptr) return {0, kMaxKvLen};
  const int q_len = max(params.request_q_len, 1);
  int seq_idx = token;
  int query = 0;  // of the request
  if (q_len > 1) {
    seq_idx = token / q_len;
    query = token - seq_idx * q_len;
  }
  if (params.token_to_req != nullptr) seq_idx = params.token_to_req[token];
  if (static_cast<u32>(seq_idx) >= static_cast<u32>(params.num_requests)) return {0, 0};
  const i64 seq_len = params.seq_lens == nullptr ? kMaxKvLen : params.seq_lens[seq_idx];
  const int kv_len = clamp_kv_len(seq_len, params.max_pages);
  if (!params.is_causal) return {seq_idx, kv_len};
  return {seq_idx, min(kv_len, max(kv_len - q_len + query + 1, 0))};
}

// Indices of a query token and KV head.
template <typename SparseParams>
__device__ inline const int* block_indices_of(const SparseParams& params, int token, int kv_head) {
  return params.block_indices + token * params.indices_stride +
         kv_head * params.indices_head_stride;
}

// How many of them count, unchecked; `load` reads a number.
template <typename SparseParams, typename Load>
__device__ inline int load_num_indices(const SparseParams& params, int token, Load load) {
  int count = params.num_indices;
  if (params.block_tables == nullptr) {
    count = load(params.seq_lens + token);
  } else if (params.has_index_counts) {
    count = load(params.block_indices + token * params.indices_stride + params.num_indices);
  }
  return count;
}

template <typename SparseParams>
__device__ inline int num_indices_of(const SparseParams& params, int token) {
  const int count = load_num_indices(params, token, [](const int* number) { return *number; });
  return max(min(count, params.num_indices), 0);
}

// A token in the cache that an index names.
struct SparseToken {
  int page;  // -1: none
  int slot;
};
