// Contract of the stream-K schedule with the sm90 kernels: what config.cuh and seq_info.cuh of a
// family define for it.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "seq_info.cuh"

static_assert(kThreads % kWarpLanes == 0 && kThreads < kWarpLanes * kWarpLanes,
              "a lane reads the sequences that each warp of the CTA counts");
static_assert(kFixedOverheadBlocks >= 0, "prologue and epilogue of a work tile, in KV blocks");
static_assert(kIsSame<decltype(SeqInfo::num_kv_blocks), int> &&
                  kIsSame<decltype(SeqInfo::num_tiles), int>,
              "KV blocks of each work tile of a sequence, and its work tiles");
static_assert(kIsSame<decltype(SeqInfo::q_len), int> && kIsSame<decltype(SeqInfo::kv_len), int>,
              "its query tokens, and its tokens in the cache");
static_assert(sizeof(SeqInfo::first_query) <= sizeof(i64),
              "index of its first query token among all");
static_assert(kIsSame<decltype(seq_info_of(*static_cast<const Params*>(nullptr), 0)), SeqInfo>,
              "a sequence by its index");
