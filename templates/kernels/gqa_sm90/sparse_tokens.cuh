// Tokens of a KV block that the query token of a sparse call attends to, as the producer warps pass
// them to the consumers. Those of a warp are a number: 0 for none, and kAll for all, which is the
// largest.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"

// Of every TMA box the first ones: how many.
struct FirstTokens {
  using Type = int;
  static constexpr int kEntries = kBoxesPerKvBlock;
  static constexpr Type kAll = kWarpTokens;

  // Of a warp, relative to its first token.
  __device__ static Type of_warp(const Type* entries, int warp) {
    const int first = first_token_of_warp(warp);
    return min(entries[first / kBoxTokens] - first % kBoxTokens, kWarpTokens);
  }
  __device__ static bool has(Type end, int warp_token) { return warp_token < end; }
};

// Any gathered ones: a bit for each.
struct GatheredTokens {
  using Type = u32;
  static constexpr int kEntries = kBlockN / kWarpLanes;
  static constexpr Type kAll = ~0u >> kWarpLanes - kWarpTokens;

  __device__ static Type of_warp(const Type* entries, int warp) {
    const int first = first_token_of_warp(warp);
    return entries[first / kWarpLanes] >> first % kWarpLanes & kAll;
  }
  __device__ static bool has(Type bits, int warp_token) { return (bits >> warp_token & 1) != 0; }
};

template <bool kGathers>
struct SparseTokensChoice {
  using Type = FirstTokens;
};
template <>
struct SparseTokensChoice<true> {
  using Type = GatheredTokens;
};
using SparseTokens = SparseTokensChoice<!kUsesTma>::Type;
static_assert(kUsesTma || kWarpLanes % kWarpTokens == 0, "a word has the tokens of whole warps");
