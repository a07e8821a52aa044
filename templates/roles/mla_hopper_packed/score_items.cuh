// The scorer, four warps: scores and probabilities of all blocks of all items. Needs scales.cuh,
// softmax.cuh, roles/mla_hopper/hand_over.cuh, blocks/wgmma_descriptor.cuh.

// Elements that one step of a product multiplies, in eight bits.
constexpr int kStepElements = 32;
constexpr int kHalfTileBytes = kTileRowBytes / 2;  // the first parts of a row of the query

// Where there are registers, the scores of all groups of dims come before the first are scaled.
constexpr int kParts = kRows > 32 ? 1 : kScaleGroups;

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

  // Begins the product of the keys in eight bits at `keys` and the tile of the query at `query`,
  // whole or of two parts, for the first of some dims or the next.
  template <bool kIsRope>
  __device__ static void multiply_tile(Scores& part, u32 keys, u32 query, bool is_first) {
    constexpr int kElements = kIsRope ? kRopeDim : kTileElements;
#pragma unroll
    for (int k = 0; k < kElements / kStepElements; ++k) {
      const u32 a = keys + descriptor_step(k * kStepElements);
      const u32 b = query + descriptor_step(k * kStepElements);
      const u64 key = kIsRope ? descriptor_64(a) : descriptor(a);
      wgmma_mma(E4m3{}, part, key, descriptor(b), !is_first || k > 0);
      if constexpr (kSplitsQuery) {
        wgmma_mma(E4m3{}, part, key, descriptor(b + descriptor_step(kHalfTileBytes)), 1);
      }
    }
  }

  // Begins the scores of the dims of one scale.
  __device__ static void begin_group(Scores& part, u32 keys, u32 query, int group) {
    constexpr int kTilesOfGroup = kScaledDims / kTileElements;
    wgmma_keep(part);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTilesOfGroup; ++i) {
      multiply_tile<false>(part, keys + descriptor_step(group * kTileBytes + i * kTileElements),
                           query + descriptor_step((group * kTilesOfGroup + i) * kQueryTileBytes),
                           i == 0);
    }
    wgmma_commit_group();
  }

  // Begins the scores of the rope part.
  __device__ void begin_rope(Scores& part, u32 keys, u32 query) {
    keys += descriptor_step(kRopeTileOffset);
    query += descriptor_step(kLatentTiles * kQueryTileBytes);
    wgmma_keep(part);
    wgmma_fence();
    if constexpr (kIsPacked) {
#pragma unroll
      for (int k = 0; k < kRopeDim / 16; ++k) {
        const u32 along = descriptor_step(k * 32);
        wgmma_mma(Bf16{}, part, descriptor(keys + along), descriptor(query + along), k > 0);
      }
    } else {
      multiply_tile<true>(part, keys, query, true);
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
  __device__ void add_group(Scores& part, const KeyScales& scales, int group) {
    wgmma_keep(part);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      scores[i] = fmaf(part[i], scales.of[i / 2 % 2][group], scores[i]);
    }
  }

  __device__ void take_scores(unsigned char* stage, const ScorerThread& own) {
    u32 query = descriptor_low(shared_address(shared.query), 16);
    mov_b32(query);
    const u32 keys = descriptor_low(shared_address(stage), 16);
    Scores parts[kParts];
    begin_rope(scores, keys, query);
#pragma unroll
    for (int group = 0; group < kParts; ++group) begin_group(parts[group], keys, query, group);
    const KeyScales scales(stage, own);
    own_scales.take(scales, own);
    own_scales.leave(stage, own, shared.units);
    wgmma_wait_group<kParts>();
    scale_rope(scales);
    if constexpr (kParts > 1) {
      add_groups<0>(parts, scales);
    } else {
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        wgmma_wait_group<0>();
        add_group(parts[0], scales, group);
        if (group + 1 < kScaleGroups) begin_group(parts[0], keys, query, group + 1);
      }
    }
  }

  // Of groups that are all under way.
  template <int kGroup>
  __device__ void add_groups(Scores (&parts)[kParts], const KeyScales& scales) {
    wgmma_wait_group<kScaleGroups - 1 - kGroup>();
    add_group(parts[kGroup], scales, kGroup);
    if constexpr (kGroup + 1 < kScaleGroups) add_groups<kGroup + 1>(parts, scales);
  }

  // Makes scores log2 units, and hides what a row does not see: a select, for the hidden score may
  // be NaN.
  __device__ void hide(int first_token, const ScorerThread& own) {
    const int token = first_token + own.token();
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const int visible = item.row_visible[own_row(r)];
      const float factor = shared.factor[own_row(r)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[r / 2 * 4 + half * 2 + r % 2];
        score = token + half * 8 < visible ? __fmul_rn(score, factor) : -kInfinity;
      }
    }
  }

  // Makes scores log2 units, and hides what a list does not name.
  __device__ void hide_unlisted(u64 unlisted, const ScorerThread& own) {
    const u64 bits = unlisted >> own.token();
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const bool is_hidden = bits >> (i / 2 % 2 * 8) & 1;
      const float factor = shared.factor[own_row(i / 4 * 2 + i % 2)];
      scores[i] = is_hidden ? -kInfinity : __fmul_rn(scores[i], factor);
    }
  }

  __device__ void take_block(int block) {
    const int stage = block_stage(taken);
    wait_for(shared.tokens_full[stage], block_parity(taken));
    fence_proxy_async();  // what threads have copied, tensor cores read
    const ScorerThread own;
    take_scores(shared.tokens[stage], own);
    bool are_scaled = false;
    const int first_token = block * kBlockTokens;
    if constexpr (kIsSparse) {
      const u64 unlisted = shared.unlisted[stage].all();
      if (unlisted != 0) {
        hide_unlisted(unlisted, own);
        are_scaled = true;
      }
    } else if (first_token + kBlockTokens > item.visible_to_all) {
      hide(first_token, own);
      are_scaled = true;
    }
    softmax.take(scores, own_scales, own, are_scaled, stage, block == item.first_block);
    ++taken;
  }

  __device__ void take_item() {
    softmax.begin(score_scale(params) * kLog2E);
#pragma unroll 1
    for (int block = item.first_block; block < item.first_block + item.blocks; ++block) {
      take_block(block);
    }
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
