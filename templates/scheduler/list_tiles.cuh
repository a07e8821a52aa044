// Lists of work tiles: how a batch-invariant launch with few of them balances its CTA groups. Where
// a work tile, one fixed split, is computed has no influence on its bits.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/sync.cuh"
#include "scheduler/phases.cuh"
#include "scheduler/schedule_range.cuh"
#include "seq_info.cuh"

// KV blocks of a work tile of each sequence, above the number of its work tiles. Aliases Q.
constexpr int kTileCountBits = 11;
constexpr u32 kMaxTileCount = (1 << kTileCountBits) - 1;
static_assert(kMaxListedTiles * kMaxRanges <= static_cast<int>(kMaxTileCount));
using TileKeys = u32[kThreads];

__device__ inline u32 tile_key(const SeqInfo& seq_info) {
  const u32 num_kv_blocks = min(static_cast<u32>(seq_info.num_kv_blocks), ~0u >> kTileCountBits);
  return num_kv_blocks << kTileCountBits | min(static_cast<u32>(seq_info.num_tiles), kMaxTileCount);
}

// Called by all threads, each with one sequence, or none. Stores the list of `cta_group` and
// returns its length; -1 if there are too many work tiles for lists. A template: other ranges have
// no list.
//
// Longer tiles come first, and CTA groups take turns, in alternate order: so a group with a longer
// tile has a shorter one next. Equally long tiles are divided evenly if few groups are idle then,
// which lets the CTA throttle count on it.
template <typename Range>
__device__ inline int list_tiles(const Params& params, int cta_group, int num_groups, int num_slots,
                                 const SeqInfo& seq_info, SchedMeta& sched_meta, Range& range) {
  TileKeys& keys = shared_memory<TileKeys>();
  const int seq_idx = static_cast<int>(threadIdx.x);
  const u32 key = seq_idx < params.num_seqs ? tile_key(seq_info) : 0;
  const u32 count = key & kMaxTileCount;
  keys[seq_idx] = key;
  __syncthreads();
  const bool differs = seq_idx < params.num_seqs && key != keys[0];
  const bool is_uniform = barrier_red_or(0, kThreads, differs) == 0;
  u32 first = seq_idx * count;  // of the tiles of this sequence, in their order
  u32 total = params.num_seqs * count;
  if (!__any_sync(~0u, is_uniform)) {
    first = total = 0;
#pragma unroll 4
    for (int other = 0; other < params.num_seqs; ++other) {
      const u32 other_key = keys[other];
      const u32 other_count = other_key & kMaxTileCount;
      const bool is_before = other_key > key || (other_key == key && other < seq_idx);
      first += is_before ? other_count : 0;
      total += other_count;
    }
  } else {
    total = params.num_seqs * (keys[0] & kMaxTileCount);
  }
  const int num_tiles = static_cast<int>(total);
  if (num_tiles > kMaxListedTiles * num_groups) return -1;
  if (num_tiles == 0) return 0;
  const int rounds = ceil_div(num_tiles, num_groups);
  const int even = num_tiles / rounds;
  const bool is_even =
      is_uniform && even * rounds == num_tiles && (rounds == 1 || even * 16 >= num_groups * 15);
  const int num_used = is_even ? even : num_groups;
  const int index = num_used - 1 - cta_group;
  if (index < 0) return 0;
  int num_listed = 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    const int turn = round % 2 == 0 ? index : num_used - 1 - index;
    const int rank = is_even ? index * rounds + round : round * num_used + turn;
    if (rank >= num_tiles) break;
    const u32 tile = rank - first;
    if (tile < count) {
      range.listed[round] = {static_cast<u16>(seq_idx), static_cast<u16>(tile),
                             static_cast<u16>(seq_info.get_first_slot())};
      if (round == 0) sched_meta.initial_state = {seq_info, seq_idx, static_cast<int>(tile), 0};
    }
    ++num_listed;
  }
  if (threadIdx.x == 0) {
    // Without a fixed overhead ranges are equal, and the CTA throttle has the free slot.
    const bool has_free_slot = num_slots < num_slots_of(params);
    static_cast<ScheduleRange&>(range) = {
        num_tiles, num_used,  index, is_even && has_free_slot ? 0 : kFixedOverheadBlocks,
        0,         num_listed};
    range.num_listed = static_cast<u16>(num_listed);
  }
  __syncthreads();
  return num_listed;
}
