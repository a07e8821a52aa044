// The scorer, four warps: scores and probabilities of all blocks of all items. Needs multiply.cuh,
// softmax.cuh, schedule.cuh, ptx/stmatrix.cuh.

struct Scorer {
  SharedMemory& shared;
  const Item& item;
  float scale;  // of scores, to log2 units
  u32& taken;  // blocks
  Scores scores;
  Softmax softmax;

  __device__ Scorer(SharedMemory& shared, const Item& item, float scale, u32& taken)
      : shared(shared), item(item), scale(scale), taken(taken) {}

  // Begins the scores of the next block, when its tokens have come.
  __device__ void begin_scores() {
    wait_for(shared.tokens_full[block_stage(taken)], block_parity(taken));
    wgmma_keep(scores);
    begin_score_steps(shared, block_stage(taken), scores);
    wgmma_commit_group();
  }

  // Scores to probabilities, in shared memory for the consumers.
  __device__ void take_scores(int block, Probabilities& probabilities) {
    const int first_token = block * kBlockTokens;
    const bool hides = first_token + kBlockTokens > item.visible_to_all;
    float moved[kScoreRows] = {1.0f, 1.0f};
    if (!softmax.take(scores, scale, probabilities, hides)) {
      scale_scores(scores, scale);
      if (hides) hide(scores, item, first_token);
      softmax.take_moving(scores, probabilities, moved);
    }
    if (has_rows()) publish(probabilities, moved, block == item.first_block);
    ++taken;
  }

  // Of a narrow tile, the last warps have none. A vote, so that compilers know all lanes agree.
  __device__ static bool has_rows() {
    return kWarpsWithRows == kScorerWarps || __any_sync(~0u, fresh_warp() % 4 < kWarpsWithRows);
  }

  // Leaves probabilities, and what the sums before them are multiplied by: of a first block there
  // are none.
  __device__ void publish(const Probabilities& probabilities, const float (&moved)[kScoreRows],
                          bool is_first) const {
    const bool moves = moved[0] != 1.0f || moved[1] != 1.0f;
    const bool rescales = __any_sync(~0u, moves) && !is_first;
    const int lane = fresh_lane();
    const int warp = fresh_warp() % 4;
    const u32 address = shared_address(shared.tokens[block_stage(taken)]) + kProbabilitiesOffset +
                        swizzled_offset<kRopeRowBytes>(warp * kRowsOfWarp + lane % 16, lane / 16);
    stmatrix_x4(address, probabilities[0], probabilities[1], probabilities[2], probabilities[3]);
    stmatrix_x4(address ^ 32, probabilities[4], probabilities[5], probabilities[6],
                probabilities[7]);
    fence_proxy_async();
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r)
        shared.rescale[block_stage(taken)][score_row(r)] = moved[r];
    }
    if (lane == 0) {
      reinterpret_cast<unsigned char*>(&shared.rescales[block_stage(taken)])[warp] =
          static_cast<unsigned char>(rescales);
    }
    __syncwarp();
    if (lane == 0) arrive_at(shared.probabilities_full[block_stage(taken)]);
  }

  // While the scores of a block come, the probabilities of the one before are added up.
  __device__ void take_item() {
    if (item.blocks == 0) {
      // When all warps have seen the query come; products would see to that.
      barrier_sync(kScorerBarrier, kScorerThreads);
      release_query();
      return;
    }
    Probabilities probabilities;
    begin_scores();
    finish(scores);
    int block = item.first_block;
#pragma unroll 1
    for (; block + 1 < item.first_block + item.blocks; ++block) {
      take_scores(block, probabilities);
      begin_scores();
      softmax.add_up(probabilities);
      finish(scores);
    }
    release_query();
    take_scores(block, probabilities);
    softmax.add_up(probabilities);
  }

  __device__ void release_query() const {
    if (fresh_thread() % 128 == 0) arrive_at(shared.query_empty);
  }

  // Leaves what the rows have come to, for the consumers.
  __device__ void leave_rows(int slot) const {
    if (!has_rows()) return;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      if (fresh_lane() % 4 != 0) continue;
      shared.row_reference[slot][score_row(r)] = softmax.reference[r];
      shared.row_sum[slot][score_row(r)] = softmax.sum[r];
    }
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.rows_full[slot]);
  }
};

__device__ inline void score_items(const Params& params, SharedMemory& shared) {
  const float scale = score_scale(params) * kLog2E;
  u32 taken = 0;
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    wait_for_query(shared, count);
    Scorer scorer(shared, item, scale, taken);
    scorer.take_item();
    count = item.count;  // not kept in a register meanwhile
    scorer.leave_rows(item_slot(count));
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count)]);
    ++count;
  }
}
