// Token addresses: from the block table or the top-k indices to the rows of the KV cache.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"

// Tokens of a KV block that each producer warp loads.
constexpr int kTokensPerProducerWarp = kBlockN / kProducerWarps;

// This lane's token of a KV block. Both halves of a warp have the same tokens.
__device__ inline int token_of_lane() {
  return reload_warp() % kProducerWarps * kTokensPerProducerWarp +
         reload_lane() % kTokensPerProducerWarp;
}

// Page ids of a work item from the block table, or its top-k indices.
struct TokenIds {
  const int* ids;
  int end;  // of the work item's tokens

  __device__ TokenIds(const Params& params, const WorkCoord& coord)
      : ids(params.block_tables + block_table_row(params, coord.seq_idx).start),
        end(min((coord.first_kv_block + coord.num_kv_blocks) * kBlockN, coord.kv_end)) {}

  // Page id or top-k index of this lane's token; -1 behind the end.
  __device__ int read(int kv_block) const {
    const int token = token_of(kv_block);
    return token < end ? ids[kIsSparse ? token : token / kPageSize] : -1;
  }

  __device__ static int token_of(int kv_block) { return kv_block * kBlockN + token_of_lane(); }
};

// Page and slot of this lane's token of a KV block in the cache.
struct TokenAddress {
  int page;  // 0 for an invalid token
  int slot;
  u32 invalid_bits;  // a bit per token of the warp, set if it is invalid

  __device__ TokenAddress(const Params& params, int id, int kv_block) {
    page = kIsSparse && id >= 0 ? id / kPageSize : id;
    slot = (kIsSparse ? id : TokenIds::token_of(kv_block)) % kPageSize;
    const bool exists = is_valid_page(page, params.num_pages);
    if (!exists) page = slot = 0;
    invalid_bits = __ballot_sync(~0u, !exists);
  }
};
static_assert(kTokensPerProducerWarp * 2 == kWarpLanes, "two lanes share a token");
