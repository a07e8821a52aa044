// Query rows of M tiles, of sequences of one length or ragged, and the top-k length of a query
// token. `cu_seqlens_q` is untrusted.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// The last sequence that begins at or before `pos`; `begin_of` returns where a sequence begins.
template <typename BeginOf>
__device__ inline int find_seq(i64 pos, int num_seqs, BeginOf begin_of) {
  int low = 0;
  int high = num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begin_of(middle) <= pos) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Sequence s owns the tiles from floor(its first row / kBlockM) + s on: as many as its rows fill,
// or one more. The number of tiles then depends only on the number of rows, and the host needs no
// lengths.
__device__ inline i64 first_tile_of(const int* cu_seqlens_q, int seq_idx, int rows_per_token) {
  return static_cast<i64>(cu_seqlens_q[seq_idx]) * rows_per_token / kBlockM + seq_idx;
}

__device__ inline int seq_of_tile(const int* cu_seqlens_q, int num_seqs, int rows_per_token,
                                  int tile) {
  return find_seq(tile, num_seqs, [&](int seq_idx) {
    return first_tile_of(cu_seqlens_q, seq_idx, rows_per_token);
  });
}

__device__ inline int seq_of_token(const int* cu_seqlens_q, int num_seqs, int token) {
  return find_seq(token, num_seqs, [&](int seq_idx) -> i64 { return cu_seqlens_q[seq_idx]; });
}

// The rows of a tile; the rest of kBlockM is padding.
struct TileRows {
  int seq_idx;
  int q_len;  // query tokens of the sequence
  i64 first_query;  // index of its first query token among all
  int first_row;  // of the tile, among the sequence's rows
  int rows;
};

// The rows of a tile. Without `cu_seqlens_q` every sequence has `q_len` query tokens and `tile`
// counts within `seq_idx`; with it `tile` counts over all sequences. A tile whose query tokens lie
// outside the tensor, whose `total_rows` are those of all `heads`, has no rows: nothing may be read
// or written there.
__device__ inline TileRows rows_of_tile(const int* cu_seqlens_q, int num_seqs, i64 q_len,
                                        int rows_per_token, int heads, i64 total_rows, int seq_idx,
                                        i64 tile) {
  i64 first_query = seq_idx * q_len;
  if (cu_seqlens_q != nullptr) {
    seq_idx = seq_of_tile(cu_seqlens_q, num_seqs, rows_per_token, static_cast<int>(tile));
    tile -= first_tile_of(cu_seqlens_q, seq_idx, rows_per_token);
    first_query = cu_seqlens_q[seq_idx];
    q_len = cu_seqlens_q[seq_idx + 1] - first_query;
  }
  const i64 first_row = tile * kBlockM;
  const bool is_inside = first_query >= 0 && q_len >= 0 &&
                         (first_query + q_len) * heads <= total_rows && first_row >= 0;
  const i64 rows = min(q_len * rows_per_token - first_row, static_cast<i64>(kBlockM));
  return {seq_idx, static_cast<int>(q_len), first_query, static_cast<int>(first_row),
          is_inside && rows > 0 ? static_cast<int>(rows) : 0};
}

// Sparse attention: `topk_length` holds the number of valid top-k indices of each query token, or
// it follows from the causal KV length.
struct TopkIndices {
  const int* seq_lens;
  const int* topk_length;
  const int* cu_seqlens_q;
  int num_seqs;
  int q_len;
  int topk;
};

__device__ inline int topk_length_of(const TopkIndices& topk_indices, int token) {
  i64 length;
  if (topk_indices.topk_length != nullptr) {
    length = topk_indices.topk_length[token];
  } else {
    int seq_idx;
    i64 end;  // of its query tokens
    if (topk_indices.cu_seqlens_q == nullptr) {
      seq_idx = token;
      if (topk_indices.q_len > 1)
        seq_idx = static_cast<int>(static_cast<u32>(token) / topk_indices.q_len);
      end = static_cast<i64>(seq_idx + 1) * topk_indices.q_len;
    } else {
      seq_idx = seq_of_token(topk_indices.cu_seqlens_q, topk_indices.num_seqs, token);
      end = topk_indices.cu_seqlens_q[seq_idx + 1];
    }
    length = topk_indices.seq_lens[seq_idx] - end + token + 1;
  }
  return static_cast<int>(
      max(static_cast<i64>(0), min(length, static_cast<i64>(topk_indices.topk))));
}
