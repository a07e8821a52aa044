// What a request is to the kernel: its rows, and the tokens that they see.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, query head of a kv head) pair of a request, query token first.
struct SeqInfo {
  int first_query;  // index of the request's first query token among all
  int q_len;
  int kv_len;  // tokens in the cache, the new ones included
  int row_tiles;  // of one kv head; none where the request's queries are not inside the tensor
  int num_tiles;
  int first_kv_block;  // of tokens, that some row sees
  int num_kv_blocks;  // of tokens, from that one on
};

// The first token that the window of a query token reaches back to.
__device__ inline int window_kv_begin(const Params& params, int kv_len, int q_len, int query) {
  return max(0, max(0, kv_len - q_len + query + 1) - params.window);
}

// Sets the tiles of tokens that some row sees.
__device__ inline void set_kv_blocks(const Params& params, SeqInfo& seq_info, int seq_len) {
  seq_info.kv_len = min(max(seq_len, 0), params.max_tokens);
  seq_info.first_kv_block = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, 0) / kBlockN;
  seq_info.num_kv_blocks = ceil_div(seq_info.kv_len, kBlockN) - seq_info.first_kv_block;
}

// `seq_len` is what seq_lens has for the request.
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = params.q_len;
  seq_info.row_tiles = params.row_tiles;
  seq_info.num_tiles = params.num_tiles;
  seq_info.first_query = seq_idx * params.q_len;
  if (params.cu_seqlens_q != nullptr) {
    const int first = params.cu_seqlens_q[seq_idx];
    const int end = params.cu_seqlens_q[seq_idx + 1];
    const bool is_inside = first >= 0 && first <= end && end <= params.tokens;
    seq_info.first_query = first;
    seq_info.q_len = is_inside ? end - first : 0;
    seq_info.row_tiles = ceil_div(seq_info.q_len * params.group_size, kBlockM);
    seq_info.num_tiles =
        seq_info.row_tiles * params.num_tiles;  // those of one tile for each kv head
  }
  set_kv_blocks(params, seq_info, seq_len);
  return seq_info;
}

__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx) {
  return seq_info_of(params, seq_idx, params.seq_lens[seq_idx]);
}

// A part is a tile of rows of a kv head of a request, or of the heads that a block takes. As many
// parts as a team has members are a unit; units of a request are alike. Positions that a unit takes
// on the line of work: one for each tile of tokens, and one if there is none, so that somebody
// writes its zeros.
__device__ inline u32 tile_kv_blocks(const SeqInfo& seq_info) {
  return static_cast<u32>(max(seq_info.num_kv_blocks, 1));
}

__device__ inline u32 linear_kv_blocks(const SeqInfo& seq_info) {
  return static_cast<u32>(seq_info.num_tiles) * tile_kv_blocks(seq_info);
}
