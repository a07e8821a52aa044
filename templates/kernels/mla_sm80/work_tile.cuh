// Work tile of a CTA: its query rows, and its split of the KV tokens.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/ragged_tiles.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, head) pair of a sequence, query token first, so that rows are
// contiguous in [tokens, heads, dim] tensors. A CTA takes kBlockM rows and one split of the KV
// tokens. In sparse attention every query token is a sequence of its own.
struct alignas(64) Work {
  int seq_idx;
  int split;
  int heads;
  int q_len;  // query tokens of this sequence
  i64 first_query;  // index of the sequence's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this CTA, among the sequence's rows
  int rows;  // of this CTA; the rest of kBlockM is padding
  int is_causal;
  int unmasked_kv_end;  // end of the tokens that every row attends to
  int kv_end;  // end of the tokens that any row attends to
  int first_kv_block;
  int end_kv_block;  // one past

  // KV limit of `row` (0 to kBlockM - 1): up to its own position, or all.
  __device__ int kv_end_of_row(int row) const {
    const int later = is_causal ? q_len - 1 - (first_row + row) / heads : 0;
    return row >= rows ? 0 : max(kv_len - later, 0);
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(int row) const { return first_query * heads + first_row + row; }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  const int cta = static_cast<int>(blockIdx.x);
  const int m_tile = cta % params.row_tiles;
  const int* cu_seqlens_q = kIsSparse ? nullptr : params.cu_seqlens_q;
  const TileRows found = rows_of_tile(cu_seqlens_q, params.num_seqs, kIsSparse ? 1 : params.q_len,
                                      params.heads, params.total_rows / params.heads,
                                      cta / params.row_tiles / params.num_splits, m_tile);
  work.seq_idx = found.seq_idx;
  work.split = cta / params.row_tiles % params.num_splits;
  work.heads = params.heads;
  work.q_len = found.q_len;
  work.first_query = found.first_query;
  work.first_row = found.first_row;
  work.rows = found.rows;
  work.is_causal = params.is_causal;

  const TopkIndices topk_indices{params.seq_lens, params.topk_length, params.cu_seqlens_q,
                                 params.num_seqs, params.q_len,       params.topk};
  work.kv_len = kIsSparse ? topk_length_of(topk_indices, work.seq_idx)
                          : clamp_kv_len(params.seq_lens[work.seq_idx],
                                         block_table_row(params, work.seq_idx).num_pages);
  work.unmasked_kv_end = work.kv_end_of_row(0);
  work.kv_end = work.kv_end_of_row(work.rows - 1);

  const int num_kv_blocks = ceil_div(work.kv_end, kBlockN);
  const int kv_blocks_per_split = ceil_div(num_kv_blocks, params.num_splits);
  work.first_kv_block = min(num_kv_blocks, work.split * kv_blocks_per_split);
  work.end_kv_block = min(num_kv_blocks, work.first_kv_block + kv_blocks_per_split);
  return work;
}
