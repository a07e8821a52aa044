// Where the tokens of a block are that a warp brings.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "scheduler/schedule_range.cuh"

// A warp brings as many of every block.
constexpr int kWarpTokens = kBlockN / kLoadWarps;

// Which token of a block this lane looks after; lanes of both halves of a warp look after the same.
__device__ inline int token_of_lane() {
  return reload_warp() % kLoadWarps * kWarpTokens + reload_lane() % kWarpTokens;
}

// Page ids of an item's blocks, or its listed tokens.
struct TokenIds {
  const int* ids;
  int end;  // tokens from here on are not read

  __device__ TokenIds(const Params& params, const WorkCoord& coord)
      : ids(params.block_tables + block_table_row(params, coord.seq_idx).start),
        end(min((coord.first_kv_block + coord.num_kv_blocks) * kBlockN, coord.kv_end)) {}

  // Of this lane's token.
  __device__ int read(int kv_block) const {
    const int token = token_of(kv_block);
    return token < end ? ids[kIsSparse ? token : token / kPageSize] : -1;
  }

  __device__ static int token_of(int kv_block) { return kv_block * kBlockN + token_of_lane(); }
};

// Where this lane's token of a block is in the cache, by what the tables have for it.
struct TokenAddress {
  int page;  // the first where there is none
  int slot;
  u32 missing;  // tokens of the warp that do not exist, a bit each

  __device__ TokenAddress(const Params& params, int id, int kv_block) {
    page = kIsSparse && id >= 0 ? id / kPageSize : id;
    slot = (kIsSparse ? id : TokenIds::token_of(kv_block)) % kPageSize;
    const bool exists = is_valid_page(page, params.num_pages);
    if (!exists) page = slot = 0;
    missing = __ballot_sync(~0u, !exists);
  }
};
static_assert(kWarpTokens * 2 == kWarpLanes, "two lanes look after a token");
