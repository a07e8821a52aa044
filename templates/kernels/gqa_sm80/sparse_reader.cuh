// Reader of the block indices of a query token and of its block table, for the warp's KV blocks.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/sparse_blocks.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "work_item.cuh"

// A token in the cache.
struct SparseToken {
  int page;  // -1: none
  int slot;
};

// Lane l reads token l % kBlockN of the warp's KV blocks: an index two blocks ahead, its page id
// one block ahead, so that no copy waits for one of the two dependent loads.
struct SparseReader {
  const int* indices;
  SparseToken current, next;
  int index_after_next;

  // A template: Params of a dense kernel lacks the indices.
  template <typename SparseParams>
  __device__ void begin(const SparseParams& params, const WorkItem& work, const int* table,
                        int kv_block) {
    indices = block_indices_of(params, static_cast<int>(work.first_query), work.kv_head);
    current = token_of(params, work, table, kv_block, index_of(work, kv_block));
    next = token_of(params, work, table, kv_block + kWarps, index_of(work, kv_block + kWarps));
    index_after_next = index_of(work, kv_block + 2 * kWarps);
  }

  // Goes on to `kv_block`, the warp's next one.
  __device__ void advance(const Params& params, const WorkItem& work, const int* table,
                          int kv_block) {
    current = next;
    next = token_of(params, work, table, kv_block + kWarps, index_after_next);
    index_after_next = index_of(work, kv_block + 2 * kWarps);
  }

  __device__ static int position_of(int kv_block) {
    return kv_block * kBlockN + lane_index() % kBlockN;
  }

  // -1 beyond this split's blocks; both ends fit in an int, as positions do.
  __device__ int index_of(const WorkItem& work, int kv_block) const {
    const int position = position_of(kv_block);
    const bool is_read = kv_block < work.end_kv_block && position < work.kv_end;
    return is_read ? indices[position / kIndexTokens] : -1;
  }

  // Indices and page ids are untrusted: an invalid one names no token.
  __device__ static SparseToken token_of(const Params& params, const WorkItem& work,
                                         const int* table, int kv_block, int index) {
    const int first_in_block = position_of(kv_block) % kIndexTokens;
    const i64 token = static_cast<i64>(index) * kIndexTokens + first_in_block;
    if (index < 0 || token >= work.kv_len) return {-1, 0};
    const int page = table[token / kPageSize];
    return {is_valid_page(page, params.num_pages) ? page : -1, static_cast<int>(token % kPageSize)};
  }
};

// The tokens of a KV block as bits, bit t for token t.
__device__ inline u32 sparse_mask(const SparseBlock& block) {
  const int lane = lane_index();
  return __ballot_sync(~0u, lane < kBlockN && block.pages[lane % kBlockN] >= 0);
}
