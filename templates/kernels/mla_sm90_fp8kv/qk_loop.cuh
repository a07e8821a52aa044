// The scorer, four warps: scores and probabilities of all blocks of all items.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"
#include "common/wgmma_descriptor.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "pipeline/kv_stages.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/fence.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/softmax_scale.cuh"

// Elements that one step of a product multiplies, in eight bits.
constexpr int kStepElements = 32;
constexpr int kHalfTileBytes = kTileRowBytes / 2;  // to the second parts of a row's rope

// With 16 and 32 rows, both parts of a query are multiplied at once, as so many rows more: keys are
// read once.
constexpr bool kStacksParts = kSplitsQuery && kRows <= 32;
using GroupScores = float[kStacksParts ? kRows : kRows / 2];

// So many groups of dims have their scores under way at once: as many as there are registers for.
constexpr int kGroupsAtOnce = kRows > 32 ? 1 : sizeof(GroupScores) > 64 ? 2 : kScaleGroups;

struct Scorer {
  const Params& params;
  SharedMemory& shared;
  const Item& item;
  u32& taken;  // blocks
  Scores scores;
  OwnScales own_scales;
  Softmax softmax;

  __device__ Scorer(const Params& params, SharedMemory& shared, const Item& item, u32& taken)
      : params(params), shared(shared), item(item), taken(taken), softmax(shared) {}

  // Begins the scores of the dims of one scale.
  __device__ static void begin_group(GroupScores& part, u32 keys, u32 query, int group) {
    keys += descriptor_step(group * kTileBytes);
    query += descriptor_step(group * kQueryParts * kQueryTileBytes);
    wgmma_keep(part);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kScaledDims / kStepElements; ++k) {
      const u32 along = descriptor_step(k * kStepElements);
      wgmma_mma(E4m3{}, part, descriptor(keys + along), descriptor(query + along), k > 0);
      if constexpr (kSplitsQuery && !kStacksParts) {
        const u32 second = query + along + descriptor_step(kQueryTileBytes);
        wgmma_mma(E4m3{}, part, descriptor(keys + along), descriptor(second), 1);
      }
    }
    wgmma_commit_group();
  }

  // Begins the scores of the rope part.
  __device__ void begin_rope(u32 keys, u32 query) {
    keys += descriptor_step(kRopeTileOffset);
    query += descriptor_step(kLatentTiles * kQueryTileBytes);
    wgmma_keep(scores);
    wgmma_fence();
    if constexpr (kIsPacked) {
#pragma unroll
      for (int k = 0; k < kRopeDim / 16; ++k) {
        const u32 along = descriptor_step(k * 32);
        wgmma_mma(Bf16{}, scores, descriptor(keys + along), descriptor(query + along), k > 0);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kRopeDim / kStepElements; ++k) {
        const u32 along = descriptor_step(k * kStepElements);
        const u64 key = descriptor_64(keys + along);
        wgmma_mma(E4m3{}, scores, key, descriptor(query + along), k > 0);
        if constexpr (kSplitsQuery) {
          const u32 second = query + along + descriptor_step(kHalfTileBytes);
          wgmma_mma(E4m3{}, scores, key, descriptor(second), 1);
        }
      }
    }
    wgmma_commit_group();
  }

  // Of a packed row with scales of its own, the rope part needs none.
  __device__ void scale_rope(const KeyScales& scales) {
    wgmma_keep(scores);
    if constexpr (kHasInnerScales) return;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      scores[i] *= kHasOneScale ? scales.of[i / 2 % 2][0] : params.rope_scale;
    }
  }

  // A group's scores come to the others by the scales of tokens g and g + 8.
  __device__ void add_group(GroupScores& part, const KeyScales& scales, int group) {
    wgmma_keep(part);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const float score = kStacksParts ? part[i] + part[i + kRows / 2] : part[i];
      scores[i] = fmaf(score, scales.of[i / 2 % 2][group], scores[i]);
    }
  }

  // Of the block in `stage`; `keys` and `query` are descriptors.
  __device__ void take_scores(int stage, const ScorerThread& own, u32 keys, u32 query) {
    unsigned char* tokens = shared.tokens[stage];
    GroupScores parts[kGroupsAtOnce];
    begin_rope(keys, query);
#pragma unroll
    for (int group = 0; group < kGroupsAtOnce; ++group) {
      begin_group(parts[group], keys, query, group);
    }
    const KeyScales scales(tokens, own);
    own_scales.take(scales, own);
    own_scales.leave(tokens, own, shared.units);
    softmax.leave_units(own, stage, false);
    wgmma_wait_group<kGroupsAtOnce>();
    scale_rope(scales);
    add_groups<0>(parts, scales, keys, query);
  }

  // From group `kGroup` on, which is under way, and so are those that may be with it.
  template <int kGroup>
  __device__ void add_groups(GroupScores (&parts)[kGroupsAtOnce], const KeyScales& scales, u32 keys,
                             u32 query) {
    constexpr int kLater = kScaleGroups - 1 - kGroup;
    constexpr int kNext = kGroup + kGroupsAtOnce;
    wgmma_wait_group<(kLater < kGroupsAtOnce ? kLater : kGroupsAtOnce - 1)>();
    GroupScores& part = parts[kGroup % kGroupsAtOnce];
    add_group(part, scales, kGroup);
    if constexpr (kNext < kScaleGroups) begin_group(part, keys, query, kNext);
    if constexpr (kLater > 0) add_groups<kGroup + 1>(parts, scales, keys, query);
  }

  // Hides the scores of the tokens g and g + 8 where `is_hidden` says so of row `r`: a select, for
  // they may be NaN, of what the row's factor makes minus infinity.
  template <typename IsHidden>
  __device__ void hide(const ScorerThread& own, IsHidden is_hidden) {
    const OwnRowPairs rows(shared, own);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float hidden = copysignf(kInfinity, -rows.of_group(r / 2).factor(r % 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_hidden(r, half * 8)) scores[r / 2 * 4 + half * 2 + r % 2] = hidden;
      }
    }
  }

  // Hides what a row does not see.
  __device__ void hide_unseen(int first_token, const ScorerThread& own) {
    const int token = first_token + own.token();
    hide(own, [&](int r, int more) { return token + more >= item.row_visible[own_row(r)]; });
  }

  // Hides what a list does not name.
  __device__ void hide_unlisted(u64 unlisted, const ScorerThread& own) {
    const u64 bits = unlisted >> own.token();
    hide(own, [&](int, int more) { return (bits >> more & 1) != 0; });
  }

  __device__ void take_block(int block) {
    const int stage = block_stage(taken);
    // Worked out before tokens are waited for, not after that.
    const u32 keys = of_all(descriptor_low(shared_address(shared.tokens[stage]), 16));
    const u32 query = of_all(descriptor_low(shared_address(shared.query), 16));
    const ScorerThread own;
    wait_for(shared.tokens_full[stage], block_parity(taken));
    fence_proxy_async();  // what threads have copied, tensor cores read
    take_scores(stage, own, keys, query);
    if (kTakesTurns && own.lane == 0) arrive_at(shared.scores_full[stage]);
    const int first_token = block * kBlockTokens;
    if constexpr (kIsSparse) {
      const u64 unlisted = shared.unlisted[stage].all();
      if (__any_sync(~0u, unlisted != 0)) hide_unlisted(unlisted, own);
    } else if (__any_sync(~0u, first_token + kBlockTokens > item.visible_to_all)) {
      hide_unseen(first_token, own);
    }
    softmax.take(scores, own_scales, own, stage, block == item.first_block);
    ++taken;
  }

  __device__ void take_item() {
    softmax.begin(score_scale(params) * kLog2E);
    const u32 end = taken + of_all(item.blocks);
    int block = item.first_block;
#pragma unroll 1
    while (__any_sync(~0u, taken != end)) take_block(block++);
    // All warps have met since they read the query last, or have not read it.
    if (fresh_thread() % kScorerThreads == 0) arrive_at(shared.query_empty);
    softmax.leave_references(item_slot(item.count));
  }
};

__device__ inline void score_items(const Params& params, SharedMemory& shared) {
  u32 taken = 0;  // blocks
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    wait_for_query(shared, count);
    Scorer scorer(params, shared, item, taken);
    scorer.take_item();
    count = item.count + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count - 1)]);
  }
}
