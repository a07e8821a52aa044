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
constexpr int kWarpTokens = kBlockTokens / kLoadingWarps;

// Which token of a block this lane looks after; lanes of both halves of a warp look after the same.
__device__ inline int own_token() {
  return fresh_warp() % kLoadingWarps * kWarpTokens + fresh_lane() % kWarpTokens;
}

// Page ids of an item's blocks, or its listed tokens.
struct TokenIds {
  const int* ids;
  int end;  // tokens from here on are not read

  __device__ TokenIds(const Params& params, const Part& part)
      : ids(params.block_tables + table_row(params, part.request).start),
        end(min((part.first_block + part.blocks) * kBlockTokens, part.visible_to_any)) {}

  // Of this lane's token.
  __device__ int read(int block) const {
    const int token = token_of(block);
    return token < end ? ids[kIsSparse ? token : token / kPageSize] : -1;
  }

  __device__ static int token_of(int block) { return block * kBlockTokens + own_token(); }
};

// Where this lane's token of a block is in the cache, by what the tables have for it.
struct TokenPlace {
  int page;  // the first where there is none
  int slot;
  u32 missing;  // tokens of the warp that do not exist, a bit each

  __device__ TokenPlace(const Params& params, int id, int block) {
    page = kIsSparse && id >= 0 ? id / kPageSize : id;
    slot = (kIsSparse ? id : TokenIds::token_of(block)) % kPageSize;
    const bool exists = is_page(page, params.num_pages);
    if (!exists) page = slot = 0;
    missing = __ballot_sync(~0u, !exists);
  }
};
static_assert(kWarpTokens * 2 == kWarpLanes, "two lanes look after a token");
