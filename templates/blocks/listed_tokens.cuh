// How many of its listed tokens a query token looks at. Needs blocks/ragged_tiles.cuh.

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
  } else if (lists.cum_seq_lens_q == nullptr) {
    const int request = token / lists.q_len;
    listed = static_cast<i64>(lists.seq_lens[request]) - lists.q_len + token % lists.q_len + 1;
  } else {
    const int request = request_of_token(lists.cum_seq_lens_q, lists.requests, token);
    listed =
        static_cast<i64>(lists.seq_lens[request]) - lists.cum_seq_lens_q[request + 1] + token + 1;
  }
  return static_cast<int>(max(static_cast<i64>(0), min(listed, static_cast<i64>(lists.top_k))));
}
