// How many of its listed tokens a query token looks at.

#pragma once

#include "common/ragged_tiles.cuh"
#include "common/types.cuh"

// Either the lists themselves have lengths, or the requests that query tokens belong to.
struct TokenLists {
  const int* seq_lens;
  const int* top_k_lens;
  const int* cum_seq_lens_q;
  int requests;
  int q_len;
  int top_k;
};

// Of query token `token`.
__device__ inline int listed_tokens(const TokenLists& lists, int token) {
  i64 listed;
  if (lists.top_k_lens != nullptr) {
    listed = lists.top_k_lens[token];
  } else {
    int request;
    i64 end;  // of its query tokens
    if (lists.cum_seq_lens_q == nullptr) {
      request = token;
      if (lists.q_len > 1) request = static_cast<int>(static_cast<u32>(token) / lists.q_len);
      end = static_cast<i64>(request + 1) * lists.q_len;
    } else {
      request = request_of_token(lists.cum_seq_lens_q, lists.requests, token);
      end = lists.cum_seq_lens_q[request + 1];
    }
    listed = lists.seq_lens[request] - end + token + 1;
  }
  return static_cast<int>(max(static_cast<i64>(0), min(listed, static_cast<i64>(lists.top_k))));
}
