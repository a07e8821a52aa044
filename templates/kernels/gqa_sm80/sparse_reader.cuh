// Reader of the block indices of a query token and of its block table, for the warp's KV blocks.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/sparse_blocks.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "work_item.cuh"

// Lane l reads token l % kBlockN of the warp's KV blocks: an index two blocks ahead, its page id
// one block ahead, so that no copy waits for one of the two dependent loads.
struct SparseReader {
  const int* indices;
  const int* value_indices;  // like the three below only if kSeparatePageIds
  SparseToken current, next;
  SparseToken value, next_value;
  int index_after_next;
  int value_index_after_next;

  // A template: Params of a dense kernel lacks the indices.
  template <typename SparseParams>
  __device__ void begin(const SparseParams& params, const WorkItem& work, const int* table,
                        int kv_block) {
    const int token = static_cast<int>(work.first_query);
    indices = block_indices_of(params, token, work.kv_head);
    if constexpr (kSeparatePageIds) {
      value_indices = value_tables_of(params) + token * params.indices_stride;
    }
    read_index(work, kv_block);
    read_token(params, work, table, kv_block);
    current = next;
    value = next_value;
    read_index(work, kv_block + kWarps);
    read_token(params, work, table, kv_block + kWarps);
    read_index(work, kv_block + 2 * kWarps);
  }

  // Goes on to `kv_block`, the warp's next one.
  __device__ void advance(const Params& params, const WorkItem& work, const int* table,
                          int kv_block) {
    current = next;
    value = next_value;
    read_token(params, work, table, kv_block + kWarps);
    read_index(work, kv_block + 2 * kWarps);
  }

  __device__ void read_index(const WorkItem& work, int kv_block) {
    index_after_next = index_of(work, indices, kv_block);
    if constexpr (kSeparatePageIds) {
      value_index_after_next = index_of(work, value_indices, kv_block);
    }
  }

  // A token without a key has no value, and the other way round.
  __device__ void read_token(const Params& params, const WorkItem& work, const int* table,
                             int kv_block) {
    next = token_of(params, work, table, kv_block, index_after_next);
    if constexpr (kSeparatePageIds) {
      next_value = token_of(params, work, table, kv_block, value_index_after_next);
      if (next.page < 0 || next_value.page < 0) next.page = next_value.page = -1;
    }
  }

  __device__ static int position_of(int kv_block) {
    return kv_block * kBlockN + lane_index() % kBlockN;
  }

  // -1 beyond this split's blocks; both ends fit in an int, as positions do.
  __device__ static int index_of(const WorkItem& work, const int* indices, int kv_block) {
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
    const i64 table_page = token / kPageSize;
    const int page =
        params.block_tables == nullptr ? static_cast<int>(table_page) : table[table_page];
    return {is_valid_page(page, params.num_pages) ? page : -1, static_cast<int>(token % kPageSize)};
  }
};

// The tokens of a KV block as bits, bit t for token t.
__device__ inline u32 sparse_mask(const SparseBlock& block) {
  const int lane = lane_index();
  return __ballot_sync(~0u, lane < kBlockN && block.pages[lane % kBlockN] >= 0);
}
